// Sends a prompt to two adapters at once, and shows both answers as they come.

import { errorOf, onAccess, tenantHeaders } from "./access.js";
import { byId, element } from "./elements.js";
import { fetchNames } from "./names.js";

const SIDES = ["a", "b"];
let running = null;

/** Offer the names of models and adapters; the first two are the ones to begin with. */
async function offerNames() {
  const names = await fetchNames();
  byId("models").replaceChildren(...names.map((value) => element("option", { value })));
  SIDES.forEach((side, at) => {
    const field = byId(`model-${side}`);
    if (!field.dataset.chosen) field.value = names[at] ?? "";
  });
}

async function send() {
  stop();
  const control = new AbortController();
  running = control;
  byId("stop").disabled = false;
  const sides = SIDES.filter((side) => byId(`model-${side}`).value.trim());
  SIDES.forEach(clear);
  await Promise.all(sides.map((side) => ask(side, control.signal)));
  if (running === control) ended();
}

function stop() {
  running?.abort();
  ended();
}

function ended() {
  running = null;
  byId("stop").disabled = true;
}

function clear(side) {
  byId(`answer-${side}`).textContent = "";
  facts(side, "");
}

/** Ask the model of a side, and show its answer. */
async function ask(side, signal) {
  const text = byId(`answer-${side}`);
  const answer = { began: performance.now(), first: null, tokens: 0, reason: "" };
  text.setAttribute("aria-busy", "true");
  try {
    for await (const event of events(side, signal)) {
      if (event.error) throw new Error(event.error.message);
      take(event, answer, text);
      facts(side, told(answer));
    }
  } catch (error) {
    if (signal.aborted) answer.reason = "stopped";
    facts(side, signal.aborted ? told(answer) : error.message, !signal.aborted);
  } finally {
    text.setAttribute("aria-busy", "false");
  }
}

function take({ choices, usage }, answer, text) {
  for (const { delta, text: piece, finish_reason: reason } of choices) {
    const added = piece ?? `${delta.reasoning_content ?? ""}${delta.content ?? ""}`;
    if (added) {
      answer.first ??= performance.now();
      text.append(added);
      text.scrollTop = text.scrollHeight;
    }
    answer.reason = reason ?? answer.reason;
  }
  answer.tokens = usage?.completion_tokens ?? answer.tokens;
  answer.last = performance.now();
}

/** Yield the events of a streamed answer, as JSON values. */
async function* events(side, signal) {
  const [path, body] = request(side);
  const headers = { "content-type": "application/json", ...tenantHeaders() };
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok) throw new Error((await errorOf(response)).message);
  let rest = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function request(side) {
  const prompt = byId("prompt").value;
  const options = {
    model: byId(`model-${side}`).value.trim(),
    max_tokens: byId("tokens").valueAsNumber,
    temperature: byId("temperature").valueAsNumber,
    stream: true,
    stream_options: { include_usage: true },
  };
  if (byId("kind").value === "completion") return ["v1/completions", { prompt, ...options }];
  return ["v1/chat/completions", { messages: [{ role: "user", content: prompt }], ...options }];
}

/** Return the figures of an answer so far. */
function told({ began, first, last, tokens, reason }) {
  const figures = [];
  if (first) figures.push(`first token after ${Math.round(first - began)} ms`);
  if (tokens) figures.push(`${tokens} tokens`);
  if (tokens > 1 && last > first) figures.push(`${Math.round((1e3 * (tokens - 1)) / (last - first))} tokens/s`);
  if (reason) figures.push(`ended: ${reason}`);
  return figures.join(" · ");
}

function facts(side, text, warn = false) {
  const line = byId(`facts-${side}`);
  line.textContent = text;
  line.className = warn ? "facts warn" : "facts dim";
}

byId("playground").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  const submits = event.key === "Enter" && (event.ctrlKey || event.metaKey);
  if (submits && event.target === byId("prompt")) byId("playground").requestSubmit();
});
for (const side of SIDES) {
  byId(`model-${side}`).addEventListener("input", ({ target }) => { target.dataset.chosen = "yes"; });
}
onAccess(offerNames);
offerNames();
