// Whose the page's requests are. Keys are in the fields of this tab alone: not in storage, cookies or addresses.

import { byId } from "./elements.js";

/** Return the headers of a tenant's request. */
export const tenantHeaders = () => ({ ...bearer("key"), ...(tenant() && { "x-loraplex-tenant": tenant() }) });

/** Return the headers of an operator's request. */
export const operatorHeaders = () => bearer("operator-key");

/** Ask for keys instead of a tenant; `operators`: whether the gateway serves the cluster's state to an operator. */
export function askForKeys(operators) {
  byId("tenant-field").hidden = true;
  byId("key-field").hidden = byId("keys-note").hidden = false;
  byId("operator-key-field").hidden = !operators;
}

/** Call `changed` when the tenant or a key has changed. */
export function onAccess(changed) {
  byId("access").addEventListener("change", changed);
  byId("access").addEventListener("submit", (event) => {
    event.preventDefault();
    changed();
  });
}

const tenant = () => (byId("tenant-field").hidden ? "" : byId("tenant").value.trim());
const bearer = (id) => (byId(id).value ? { authorization: `Bearer ${byId(id).value.trim()}` } : {});

/** Return the error of an answer that is not OK, as `status`, `code` and `message`. */
export async function errorOf(response) {
  const body = await response.json().catch(() => ({}));
  const { code = "", message = response.statusText } = body.error ?? {};
  return { status: response.status, code, message };
}
