"""The load tester: it draws requests from a seed, sends them as streams, and reports what their clients saw.

A plan (`plan_file`) says when requests come (`arrivals`) and what they ask for (`workload`). Generator processes
(`fleet`, `generator`) send them (`sender`) and note every time (`samples`); `statistics` reduces those to
figures, `report` and `page` write them, `compare` sets two reports side by side.
"""
