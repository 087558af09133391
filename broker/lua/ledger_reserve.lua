#!lua
-- Reserve tokens for a request in its accounts, or go on with its reservation where it is resumed. Answers with the
-- reservation; or with what refuses it, and changes nothing.
--- @include "ledger"

if is_behind or closed_ms > 0 then return cmsgpack.pack({behind = is_behind, closed_ms = closed_ms}) end
-- `received`: output tokens that the client of a resumed request has; -1: a new request.
local asked, received = message.reservation, message.received
local r, is_known = reservation_of(asked.id)
-- The same call again, or one that has ended before this server got to it.
if is_known and (received < 0 or r.holder == asked.holder) then return reply({reservation = r}) end

if is_known then
  r.used_output = math.max(r.used_output, received)
  if r.used_output > 0 then r.used_input = r.paid_input + r.input end -- its prompt was computed
  if r.open and r.accounts == asked.accounts then r.facts = asked.facts end
elseif received >= 0 then -- forgotten; its events have ids that no earlier ones have
  r.used_output, r.paid_output, r.charges = received, received, now
end
local owed_input, owed_output = math.max(0, r.used_input - r.paid_input), math.max(0, r.used_output - r.paid_output)
-- What it needs from now on, and what it holds already. One that counts as another has what its client has as input.
local is_another = received >= 0 and (not is_known or r.resumes >= FREE_RESUMES)
local is_first = r.charges == 0 and owed_input + owed_output == 0
local input, output = math.max(0, asked.input - r.paid_input - owed_input), math.max(0, asked.output - math.max(0, received))
if is_another then input = asked.input > 0 and asked.input + received or 0 end
local needs = amounts_of((is_another or is_first) and 1 or 0, input, output, 1)
local holds = amounts_of(r.requests, r.input - owed_input, r.output - owed_output, r.streams)

-- Return the time in ms until a window ends.
local function left_ms(window)
  if window == 'ever' then return STREAM_RETRY_MS end
  local size_ms = window == 'minute' and MINUTE_MS or DAY_MS
  local ms = size_ms - now % size_ms
  while windows_of(now + ms)[window] == windows_of(now)[window] do ms = ms + size_ms end
  return ms
end

local NEVER_MS = 2 ^ 53
local refused = {'', '', 0} -- the refusal whose room comes last: account, limit, time until there is room
for _, limit in ipairs(message.limits) do
  local name, limit_name, field, most = unpack(limit)
  local account, own = account_of(name), 0
  if string.find(' ' .. r.accounts .. ' ', ' ' .. name .. ' ', 1, true) then own = holds[field] end
  -- A request that is resumed in time has its former place, or one of as many again.
  local room = (r.open and field == 'streams' and 2 * most or most) - account[field] - account['held_' .. field]
  if needs[field] > math.max(0, own) and needs[field] - own > room then
    local wait_ms = needs[field] > most and NEVER_MS or left_ms(COUNTS[field])
    if wait_ms > refused[3] then refused = {name, limit_name, wait_ms} end
  end
end
if refused[3] > 0 then return cmsgpack.pack({refused = refused}) end

local at_ms = r.open and r.at_ms or now
if is_known then settle(r) end
-- Tokens that its client has not got are made again, and charged again.
r.sent = math.max(r.sent, r.used_output)
if received >= 0 then r.used_output, r.paid_output, r.resumes = received, received, r.resumes + 1 end
r.at_ms, r.holder, r.accounts, r.facts, r.open = at_ms, asked.holder, asked.accounts, asked.facts, true
r.requests, r.input, r.output, r.streams = needs.requests, input, output, 1
add(r, 'held_', r.requests, input, output, 1)
write(r)
if number == 0 then count_call() end
return reply({reservation = r})
