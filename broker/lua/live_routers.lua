#!lua flags=allow-oom
-- Answers the addresses of the live routers.
--- @include "keys"
--- @include "routers"

return live_routers()
