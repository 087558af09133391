"""The terms of the ledger (broker.ledger), for its scripts and their model (bench.ledger_model)."""

from __future__ import annotations

# Time in ms for which a reservation of tokens is held after its router's last look, every second; and for how long one
# is held whose call ended before its answer, so that the request may be resumed.
HELD_MS = 10_000
LINGER_MS = 5_000
# Time in ms for which a reservation stays in Redis after its last change: while held, and once ended.
OPEN_RECORD_MS = 600_000
ENDED_RECORD_MS = 120_000
# Maximum output tokens in a day that are made again without a charge, because clients of resumed requests say that they
# have not got them: so many, and a percentage of the account's tokens of that day. A lost link has some underway.
REPEATED_TOKENS = 256
REPEATED_PERCENT = 2
# Number of times that a request may be resumed before each further one counts as a request, with its prompt.
FREE_RESUMES = 8
# Time in ms in which routers tell a new account what they know of a lost one, and the percentage of each limit that
# it grants meanwhile, beside one request.
RECOVERY_MS = 2_000
RECOVERY_PERCENT = 2
# Time in ms after which any router reports a charge, because the one that made it has not; and maximum charges that a
# look answers with.
REPORT_AFTER_MS = 2_000
CHARGES_PER_LOOK = 64
# Maximum reservations that a look ends, because no router has renewed them.
EXPIRED_PER_LOOK = 256
# Time in ms after which a tenant with all its streams is to call again.
STREAM_RETRY_MS = 1_000
# Time in ms for which an account is kept after the last look at it: longer than a month.
ACCOUNT_MS = 3_000_000_000
