#!lua flags=allow-oom
-- Record that a worker claims no more for now.
--- @include "workers"

clear_free_rows(ARGV[2])
