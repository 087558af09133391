// Shows an adapter's releases, and promotes, aborts or rolls one back. Polls while the page is visible.

import { errorOf, onAccess, tenantHeaders } from "./access.js";
import { byId, element, showTable } from "./elements.js";
import { columns, whole } from "./tables.js";

const POLL_MS = 1_000;
const DIGEST_CHARACTERS = 19;
// The states of releases that an action is for; the others are refused by the store.
const ACTIONS = {
  promote: ["qualified", "canary"],
  abort: ["imported", "verified", "qualified", "canary"],
  rollback: ["canary", "live"],
};

let timer = 0;
// Number of the newest poll: the answer of an older one is dropped.
let newest = 0;
let shown = null;
// The error of the last change, which stays until the next one.
let refusal = "";

const adapter = () => byId("release-adapter").value.trim();
const path = (...parts) => ["v1/adapters", encodeURIComponent(adapter()), "releases", ...parts].join("/");
const number = (release) => release.name.split("/").at(-1);
const state = (value) => value.replace("RELEASE_STATE_", "").replaceAll("_", " ").toLowerCase();
const time = (value) => new Date(value).toLocaleString();
const list = (figures) => Object.entries(figures).map(([name, value]) => `${name} ${short(value)}`).sort().join(", ");
const short = (value) => value.toLocaleString("en", { maximumSignificantDigits: 4 });

async function ask(address, options = {}) {
  const response = await fetch(address, { ...options, headers: { ...tenantHeaders(), ...options.headers } });
  if (!response.ok) throw await errorOf(response);
  return response.json();
}

async function poll() {
  clearTimeout(timer);
  const mine = ++newest;
  let again = adapter() !== "";
  try {
    const answer = again ? await read() : null;
    if (mine !== newest) return;
    show(answer);
  } catch (error) {
    if (mine !== newest) return;
    show(null);
    tell(error.status ? error.message : "The gateway does not answer.", true);
    again = !(error.status < 500); // a name or a key that is wrong stays wrong until it is changed
  }
  if (again && !document.hidden) timer = setTimeout(poll, POLL_MS);
}

/** Return the adapter's releases, newest first, and the chosen one or else the newest with its history. */
async function read() {
  const { releases } = await ask(path());
  const chosen = releases.find((release) => number(release) === byId("release-number").value) ?? releases[0];
  if (!chosen) return { releases, release: null };
  return { releases, ...await ask(path(number(chosen))) };
}

function show(answer) {
  const { releases, release } = answer ?? { releases: [], release: null };
  shown = release;
  byId("release").hidden = !release;
  offerNumbers(releases, release);
  if (!answer) {
    byId("releases").replaceChildren();
    tell("", false);
    return;
  }
  const heads = columns("release*", "state*", "share", "gates", "revision*", "run*", "created*");
  const none = "This adapter has no releases: `loraplex releases push` makes one.";
  showTable("releases", "releases-title", heads, releases.map(row), none);
  if (release) showRelease(release);
  tell(refusal, refusal !== "");
}

function offerNumbers(releases, release) {
  const field = byId("release-number");
  const options = releases.map((one) => [number(one), `${number(one)}: ${state(one.state)}`]);
  if (field.dataset.options !== JSON.stringify(options)) { // else an open list would close
    field.dataset.options = JSON.stringify(options);
    field.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  }
  if (release) field.value = number(release);
}

function row(release) {
  const { gates, digest, origin, create_time: created } = release;
  const passed = gates.length ? `${gates.filter((gate) => gate.passed).length} of ${gates.length}` : "-";
  return [
    number(release), state(release.state), share(release), passed, digest.slice(0, DIGEST_CHARACTERS), origin.run_id || "-",
    time(created),
  ];
}

function share({ state: value, rollout }) {
  return state(value) === "canary" ? `${short(rollout.plan.steps[rollout.step].permille / 10)}%` : "-";
}

function showRelease(release) {
  const { origin, signer, digest } = release;
  byId("release-title").textContent = `Release ${number(release)}: ${state(release.state)}`;
  const facts = { revision: digest, signer, ...origin, datasets: origin.datasets.join(", ") };
  byId("release-facts").textContent = Object.entries(facts).filter(([, value]) => value)
    .map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`).join(" · ");
  for (const [action, states] of Object.entries(ACTIONS)) byId(action).disabled = !states.includes(state(release.state));
  byId("plan").hidden = state(release.state) !== "qualified";
  showPromotion();
  const gates = release.gates.map(({ name, passed, figures, detail }) => [
    name, passed ? "passed" : "FAILED", detail, list(figures),
  ]);
  showTable("gates", "gates-title", columns("gate*", "verdict*", "detail*", "figures*"), gates, "No gates have run.");
  showRollout(release.rollout);
  const events = release.history.map(({ time: at, after, actor, cause, figures }) => [
    time(at), state(after), actor, cause, list(figures),
  ]);
  showTable("history", "history-title", columns("time*", "state*", "by*", "cause*", "figures*"), events.reverse(), "");
}

function showRollout(rollout) {
  byId("rollout").hidden = !rollout;
  if (!rollout) return;
  const { plan, step, figures } = rollout;
  const { requests, seconds } = plan.steps[step];
  const ends = [requests && `${whole(requests)} answers`, seconds && `${whole(seconds)} s`].filter(Boolean).join(" and ");
  const rules = list(plan.rules).replaceAll("_", " ");
  byId("rollout-facts").textContent = [
    `Step ${step + 1} of ${plan.steps.length}: ${short(plan.steps[step].permille / 10)}% of the requests, `
      + (ends ? `for ${ends}.` : "until it is promoted."),
    plan.shadow_permille ? `Shadow: ${short(plan.shadow_permille / 10)}% of live requests.` : "",
    rules && `Rules: ${rules}.`,
  ].filter(Boolean).join(" ");
  const of = (name, shape) => (figures[name] === undefined ? "-" : shape(figures[name]));
  const both = (title, name, shape) => [title, of(`live_${name}`, shape), of(`candidate_${name}`, shape)];
  const portion = (value) => `${short(100 * value)}%`;
  const milliseconds = (value) => whole(Math.round(value));
  const rows = [
    both("requests", "requests", whole),
    both("failed", "error_rate", portion),
    both("refusals", "refusal_rate", portion),
    both("ms to the first token, p50", "ttft_ms", milliseconds),
  ];
  if (figures.shadow_requests) {
    rows.push(
      ["shadow requests", "", of("shadow_requests", whole)],
      ["shadow requests that failed", "", of("shadow_failure_rate", portion)],
      ["equal tokens", "", of("agreement", portion)],
      ["log probability, difference in nats", "", of("logprob_difference", short)],
      ["ms of a whole answer", of("shadowed_ms", milliseconds), of("shadow_ms", milliseconds)],
    );
  }
  showTable("comparison", "comparison-title", columns("of this step*", "live", "candidate"), rows, "");
}

/** Let the button say what it does. */
function showPromotion() {
  byId("promote").textContent = canary() ? "Start canary" : "Make live";
}

const canary = () => !byId("plan").hidden && byId("steps").value.trim() !== "";

/** Return the plan in the fields; null: live at once. */
function plan() {
  if (!canary()) return null;
  const value = (id) => byId(id).valueAsNumber || 0;
  const requests = value("step-requests");
  const steps = byId("steps").value.split(",").map((part) => ({ permille: Math.round(Number(part) * 10), requests }));
  const rules = { max_error_rise: value("error-rise") };
  for (const [rule, id] of [["max_ttft_ratio", "ttft-ratio"], ["min_agreement", "agreement"]]) {
    if (byId(id).value) rules[rule] = value(id);
  }
  return { steps, rules, shadow_permille: Math.round(value("shadow") * 10) };
}

async function change(action) {
  const { etag } = shown;
  const address = path(number(shown));
  const body = JSON.stringify({ action, etag, ...(action === "promote" && { plan: plan() }) });
  if (!await confirmed(`${byId(action).textContent}: release ${number(shown)} of ${adapter()}?`)) return;
  refusal = "";
  try {
    await ask(address, { method: "POST", body, headers: { "content-type": "application/json" } });
  } catch (error) {
    refusal = error.status ? error.message : "The gateway does not answer.";
  }
  poll();
}

/** Ask whether to go on. The buttons answer, not the dialog's close event: it comes late, maybe to the next question. */
function confirmed(question) {
  const dialog = byId("confirm");
  byId("question").textContent = question;
  dialog.showModal();
  return new Promise((done) => {
    const answer = (value) => () => {
      dialog.close();
      done(value);
    };
    byId("yes").onclick = answer(true);
    byId("no").onclick = answer(false);
    dialog.oncancel = answer(false); // Escape
  });
}

function tell(text, warn) {
  const status = byId("releases-status");
  if (status.textContent !== text) status.textContent = text; // screen readers read each change
  status.className = warn ? "warn" : "dim";
}

function restart({ target } = {}) {
  refusal = "";
  if (target === byId("release-adapter")) byId("release-number").value = ""; // its numbers are another adapter's
  poll();
}

for (const action of Object.keys(ACTIONS)) byId(action).addEventListener("click", () => change(action));
byId("plan").addEventListener("input", showPromotion);
byId("releases-form").addEventListener("submit", (event) => event.preventDefault());
byId("releases-form").addEventListener("change", restart);
onAccess(restart);
document.addEventListener("visibilitychange", () => document.hidden || poll());
