-- A reservation as its router knows it.
--- @include "ledger_account"

-- Number of the arguments that make a reservation.
local GIVEN = 13

-- Return the id and the reservation that begin at argument `first`.
local function given_reservation(first)
  local function number(offset) return tonumber(ARGV[first + offset]) end
  return ARGV[first], {state = 'open', owner = ARGV[first + 1], subject = ARGV[first + 2], part = number(3), base = number(4),
    requests = number(5), input = number(6), output = number(7), used_input = number(8), used_output = number(9),
    minute = number(10), day = number(11), month = number(12), again = 0, told = number(8), resumes = 0}
end

-- Take over what its router says that a request has used by now.
local function take_use(r, given)
  if given.subject ~= '' then r.subject = given.subject end
  r.used_input, r.used_output = math.max(r.used_input, given.used_input), math.max(r.used_output, given.used_output)
end
