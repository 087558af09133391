#!lua flags=allow-oom
-- Charge tenants for the usage that workers report.
--- @include "charges"

charge_reports(ARGV[2])
