// Shows what a tenant and its keys have used this minute, day and month, beside their limits. An operator chooses a tenant.

import { errorOf, onAccess, operatorHeaders, tenantHeaders } from "./access.js";
import { byId, element, showTable } from "./elements.js";

const POLL_MS = 5_000;
// Shares of a limit from which it is shown as nearly reached, and as reached.
const NEAR = 0.8;
const REACHED = 0.999;

let timer = 0;
// Number of the newest poll: the answer of an older one is dropped.
let newest = 0;

const chosen = () => byId("usage-tenant").value;

async function poll() {
  clearTimeout(timer);
  const mine = ++newest;
  let again = true;
  try {
    const answer = await read();
    if (mine !== newest) return;
    show(answer);
  } catch (error) {
    if (mine !== newest) return;
    byId("usage").replaceChildren();
    tell(error.status ? error.message : "The gateway does not answer.");
    again = !(error.status < 500); // a key that may not ask does so when it is changed
  }
  if (again && !document.hidden) timer = setTimeout(poll, POLL_MS);
}

/** Return the usage that an operator sees, or else that of the tenant. */
async function read() {
  const query = chosen() ? `?tenant=${encodeURIComponent(chosen())}` : "";
  const all = await fetch(`cluster/usage${query}`, { headers: operatorHeaders() });
  if (all.ok) return { ...await all.json(), operator: true };
  const own = await fetch("v1/usage", { headers: tenantHeaders() });
  if (!own.ok) throw await errorOf(own);
  return { ...await own.json(), operator: false };
}

function show({ tenants, usage, operator }) {
  byId("usage-tenant-field").hidden = !operator;
  if (operator) offer(tenants);
  const limits = Object.keys(usage[0]?.counts ?? {})
    .filter((limit) => usage.some(({ counts }) => counts[limit].used || counts[limit].limit !== null));
  if (byId("usage").dataset.limits !== limits.join()) byId("usage").replaceChildren(); // a table with other heads
  byId("usage").dataset.limits = limits.join();
  const heads = [{ title: "tenant", name: true }, { title: "key or adapter", name: true }]
    .concat(limits.map((limit) => ({ title: limit.replace("_per_", " / ").replaceAll("_", " "), name: true })));
  const rows = usage.map(({ tenant, key, label, adapter, counts }) => [
    tenant || "-", adapter || label || key || "all",
    ...limits.map((limit) => count(counts[limit], `${limit} of ${adapter || key || tenant}`)),
  ]);
  showTable("usage", "usage-title", heads, rows, "Nothing is counted: no plan has limits, and no usage events are written.");
  tell(operator && !chosen() && usage.length ? "Choose a tenant to see its keys and adapters." : "");
}

/** Offer the tenants in the list, the chosen one among them. */
function offer(tenants) {
  const field = byId("usage-tenant");
  if (field.dataset.tenants === JSON.stringify(tenants)) return; // else an open list would close
  field.dataset.tenants = JSON.stringify(tenants);
  const before = field.value;
  field.replaceChildren(element("option", { value: "" }, "all tenants"), ...tenants.map((one) => element("option", { value: one }, one)));
  field.value = tenants.includes(before) ? before : "";
}

/** Return a bar of what is used of a limit, or the number where there is no limit. */
function count({ used, limit }, label) {
  if (limit === null) return short(used);
  const most = Math.max(limit, Number.MIN_VALUE);
  const shown = { min: 0, max: most, low: NEAR * most, high: REACHED * most, optimum: 0, value: used };
  const meter = element("meter", { ...shown, "aria-label": label });
  return element("span", {}, meter, `${short(used)} of ${short(limit)}`);
}

const short = (value) => value.toLocaleString("en", { maximumFractionDigits: 4 });

function tell(text) {
  const line = byId("usage-status");
  if (line.textContent !== text) line.textContent = text; // screen readers read each change
}

byId("usage-tenant").addEventListener("change", poll);
onAccess(poll);
document.addEventListener("visibilitychange", () => document.hidden || poll());
poll();
