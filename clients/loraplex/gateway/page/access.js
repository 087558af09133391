// Whose the page's requests are: of a person who signed in, whose session is in a cookie that no script can read; or
// of the keys in the fields of this tab alone, which are not in storage, cookies or addresses.

import { byId, element } from "./elements.js";

// Seconds before its end at which a session gets another token, and between attempts while the provider is away.
const RENEW_S = 30, AWAY_S = 30;
const OWN_ROLES = ["tenant-user", "tenant-admin", "trainer"];
const asked = await fetch("session").then((answer) => (answer.ok ? answer.json() : {})).catch(() => ({}));
const issuers = asked.issuers ?? [];
let person = asked.person ?? null;
let renewAt = Infinity, againS = 1;
const listeners = [];

/** Return why the cluster's state is not asked for: the person must sign in, or may not see it; empty: it is. */
export function whyNoState() {
  if (!issuers.length) return "";
  if (!person) return "Sign in to use the page.";
  return person.roles.every((role) => OWN_ROLES.includes(role)) ? `signed in: ${person.tenant}` : "";
}

function showPerson() {
  if (!issuers.length) return;
  byId("tenant-field").hidden = true;
  const link = ({ issuer, name }) =>
    element("a", { href: `session/sign-in?issuer=${encodeURIComponent(issuer)}` }, `Sign in at ${name}`);
  const who = person && `${person.name}: ${[person.tenant, ...person.roles].filter(Boolean).join(", ")}`;
  const leave = element("button", { type: "button", id: "sign-out" }, "Sign out");
  leave.addEventListener("click", signOut);
  byId("person").replaceChildren(...(person ? [element("span", {}, who), leave] : issuers.map(link)));
  byId("person").hidden = false;
  const left = person ? person.expires_in - (person.renewable ? RENEW_S : 0) : Infinity;
  renewAt = Date.now() + Math.max(againS, left) * 1e3;
}

async function signOut() {
  const answer = await fetch("session/end", { method: "POST" });
  if (answer.ok) location.assign((await answer.json()).to);
}

/** Get the session another token, once for all tabs; a session that has ended is nobody's. */
async function renew() {
  renewAt = Infinity;
  await navigator.locks.request("renew", async () => {
    const now = await fetch("session").then((answer) => answer.json());
    if (now.person?.expires_in > RENEW_S) person = now.person; // another tab was first
    else {
      const answer = await fetch("session/renew", { method: "POST" });
      if (!answer.ok && answer.status !== 401) throw new Error("away");
      person = answer.ok ? (await answer.json()).person : null;
    }
    againS = 1;
  }).catch(() => (againS = AWAY_S, person = { ...person, expires_in: 0 }));
  showPerson();
  listeners.forEach((changed) => changed());
}

showPerson();
setInterval(() => Date.now() > renewAt && renew(), 1_000);

/** Return the headers of a tenant's request. */
export const tenantHeaders = () => ({ ...bearer("key"), ...(tenant() && { "x-loraplex-tenant": tenant() }) });

/** Return the headers of an operator's request. */
export const operatorHeaders = () => bearer("operator-key");

/** Ask for keys instead of a tenant; `operators`: whether the gateway serves the cluster's state to an operator. */
export function askForKeys(operators) {
  if (issuers.length) return;
  byId("tenant-field").hidden = true;
  byId("key-field").hidden = byId("keys-note").hidden = false;
  byId("operator-key-field").hidden = !operators;
}

/** Call `changed` when the tenant or a key has changed. */
export function onAccess(changed) {
  listeners.push(changed);
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
