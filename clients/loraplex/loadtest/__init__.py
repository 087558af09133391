"""The load tester: draws requests from a seed, sends them as streams, and reports what their clients saw.

A plan (`plan`) says when requests are sent (`arrivals`) and what they ask for (`workload`). Generator processes
(`fleet`, `generator`) send them (`sender`: to routers, `http_sender`: to any server of OpenAI's protocol) and record
every time (`samples`). `statistics` reduces the times to figures, `report` writes them, and `compare` compares two
reports.
"""
