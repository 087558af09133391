-- Reads of packed values. One that something else than these scripts has written must not end a script.

local function unpack_into(check, packed) return check(cmsgpack.unpack(packed)) end

-- Return true and what `check` returns for the packed values; false where they cannot be read or `check` raises an error,
-- as a comparison does where a type is another.
local function read_packed(check, packed) return pcall(unpack_into, check, packed) end
