// The names that the tenant may use: base models, and adapters with the digests of their aliases.

import { tenantHeaders } from "./access.js";

/** Names of the tenant's adapters by the digest of a revision, as TENANT/ADAPTER@ALIAS. */
export const adapterNames = new Map();

/** Fetch the names; returns what the fields of the playground may have, adapters first. */
export async function fetchNames() {
  const response = await fetch("v1/models", { headers: tenantHeaders() }).catch(() => null);
  if (!response?.ok) return [];
  const { data } = await response.json();
  const adapters = data.filter(({ parent }) => parent);
  adapterNames.clear();
  for (const { id, owned_by: tenant, aliases } of adapters) {
    for (const [alias, digest] of Object.entries(aliases)) adapterNames.set(digest, `${tenant}/${id}@${alias}`);
  }
  return [...adapters, ...data.filter(({ parent }) => !parent)].map(({ id }) => id);
}
