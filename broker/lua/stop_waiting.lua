#!lua flags=allow-oom
-- End the wait of a worker's claim, by a wake-up for this worker alone.
--- @include "workers"

wake_worker(ARGV[2])
