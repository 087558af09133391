// Polls the cluster's state every second while the page is visible.

import { askForKeys, errorOf, onAccess, operatorHeaders, whyNoState } from "./access.js";
import { byId } from "./elements.js";
import { adapterNames } from "./names.js";
import { Interval } from "./rates.js";
import { showCluster } from "./tables.js";

const POLL_MS = 1_000;
// Number of states that are kept: rates are those of the interval that they cover.
const STATES = 10;
// Number of values of a line.
const VALUES = 60;

const states = [];
const lines = { tokens: [], requests: [], open: [], ttft: [] };
let timer = 0;
// Number of the newest poll: the answer of an older one is dropped.
let newest = 0;

async function poll() {
  clearTimeout(timer);
  const mine = ++newest;
  const why = whyNoState();
  if (why) {
    byId("cluster").hidden = true;
    tell(why, false);
    return;
  }
  try {
    const response = await fetch("cluster/state", { headers: operatorHeaders() });
    const answer = response.ok ? await response.json() : await errorOf(response);
    if (mine !== newest) return;
    if (response.ok) show(answer);
    else refused(answer);
  } catch {
    if (mine !== newest) return;
    tell("The gateway does not answer.", true);
  }
  if (!document.hidden) timer = setTimeout(poll, POLL_MS);
}

function show(state) {
  const last = states.at(-1) ?? null;
  states.push(state);
  if (states.length > STATES) states.shift();
  if (last) remember(new Interval(state, last));
  const interval = new Interval(state, last ? states[0] : null);
  showCluster(interval, lines, adapterNames);
  byId("window").textContent = last
    ? `over the last ${Math.round(Math.max(...interval.routers.map(({ seconds }) => seconds)))} s`
    : "since the routers' start";
  byId("cluster").hidden = false;
  const silent = state.routers.filter(({ error }) => error).length;
  tell(silent ? `${silent} of ${state.routers.length} routers do not answer.` : "live", silent > 0);
}

function remember(second) {
  const values = {
    tokens: second.perSecond("completion_tokens"),
    requests: second.requests().get("OK") ?? 0,
    open: second.total("open"),
    ttft: second.quantile("time_to_first_token", 0.5) ?? 0,
  };
  for (const [name, value] of Object.entries(values)) {
    lines[name].push(value);
    if (lines[name].length > VALUES) lines[name].shift();
  }
}

/** Show why there is no state. Routers with credentials refuse a request without a key. */
function refused({ status, code, message }) {
  const served = code !== "state_not_served";
  if (status === 401 || status === 403 || !served) {
    askForKeys(served);
    byId("cluster").hidden = true;
    states.length = 0;
  }
  tell(status === 401 && served ? `The cluster's state needs a key: ${message}` : message, true);
}

function tell(text, warn) {
  const status = byId("status");
  if (status.textContent !== text) status.textContent = text; // screen readers read each change
  status.className = warn ? "warn" : "dim";
}

onAccess(poll);
document.addEventListener("visibilitychange", () => document.hidden || poll());
poll();
