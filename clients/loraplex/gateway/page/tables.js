// Shows a state of the cluster: figures and tables.

import { bar, byId, element, showTable, sparkline } from "./elements.js";

const ADAPTERS_SHOWN = 20;
const TENANTS_SHOWN = 20;
const REVISIONS_SHOWN = 4;
const DIGEST_CHARACTERS = 19;

/** Show everything of an interval. `lines` has the last values of figures; `names`, adapters' names by digest. */
export function showCluster(interval, lines, names) {
  showCards(interval, lines);
  showLatencies(interval);
  showWorkers(interval);
  showTiers(interval.now.workers, names);
  showTraffic(interval);
  showTenants(interval);
  showQueues(interval.now.queues);
  showRouters(interval);
}

function showCards(interval, lines) {
  const ended = interval.requests();
  const answered = ended.get("OK") ?? 0;
  ended.delete("OK");
  const ttft = interval.quantile("time_to_first_token", 0.5);
  const cards = [
    card(rate(interval.perSecond("completion_tokens"), 0), "tokens/s", lines.tokens),
    card(rate(answered), "requests/s", lines.requests),
    card(whole(interval.total("open")), "requests open", lines.open),
    card(milliseconds(ttft), "ms to the first token, p50", lines.ttft),
    card(rate(interval.perSecond("prompt_tokens"), 0), "prompt tokens/s"),
    card(whole(interval.total("redispatches")), "redispatches since the start"),
    card(whole(interval.total("workers_lost")), "workers lost since the start"),
  ];
  for (const [code, count] of [...ended].sort()) {
    if (count) cards.push(card(rate(count), `${code}/s`, null, "bad"));
  }
  byId("cards").replaceChildren(...cards);
}

function card(value, name, line = null, kind = "") {
  const node = element("div", kind ? { class: kind } : {}, element("b", {}, value), element("span", {}, name));
  if (line) node.append(sparkline(line, `${name}, the last minute`));
  return node;
}

function showLatencies(interval) {
  const rows = LATENCIES.map(([title, field]) => [
    title, ...[0.5, 0.9, 0.99].map((share) => milliseconds(interval.quantile(field, share))),
  ]);
  showTable("latencies", "rates-title", columns("milliseconds*", "p50", "p90", "p99"), rows, "");
}

const LATENCIES = [
  ["to the first token", "time_to_first_token"],
  ["between tokens", "inter_token_latency"],
  ["in the queue", "queue_time"],
];

function showWorkers(interval) {
  const rows = interval.now.workers.map((worker) => {
    const { total, referenced } = worker.blocks;
    const steps = interval.steps(worker);
    return [
      worker.worker_id,
      worker.phase,
      worker.model,
      bar(worker.rows_running, worker.rows_limit, "rows in use", `${worker.rows_running}/${worker.rows_limit}`),
      whole(worker.rows_waiting),
      bar(referenced, total, "KV cache in use", percent(referenced, total)),
      steps === null ? "-" : rate(steps, 0),
    ];
  });
  const heads = columns("worker*", "phase*", "model*", "rows", "waiting", "KV cache", "steps/s");
  showTable("workers", "workers-title", heads, rows, "No worker is alive.");
}

function showTiers(workers, names) {
  const rows = workers.map(({ worker_id, adapter_slots: slots, adapter_tiers: tiers, adapters }) => [
    worker_id,
    bar(slots.used, slots.total, "adapter slots in use", `${slots.used}/${slots.total}`),
    whole(slots.pinned),
    mebibytes(tiers.device_bytes),
    mebibytes(tiers.host_bytes),
    `${whole(tiers.disk_adapters)}, ${mebibytes(tiers.disk_bytes)}`,
    whole(tiers.loading),
    whole(tiers.fetching),
    percent(tiers.hits, tiers.hits + tiers.misses),
    whole(tiers.swaps),
    revisions(adapters, names),
  ]);
  const heads = columns(
    "worker*", "on the device", "pinned", "device MiB", "host MiB", "on disk, MiB", "loading", "fetching", "hits", "swaps",
    "revisions on the device*",
  );
  showTable("tiers", "tiers-title", heads, rows, "No worker is alive.");
}

function revisions(digests, names) {
  const all = digests.map((digest) => names.get(digest) ?? digest.slice(0, DIGEST_CHARACTERS));
  const more = all.length > REVISIONS_SHOWN ? ` and ${all.length - REVISIONS_SHOWN} more` : "";
  return element("span", { title: all.join("\n") }, all.slice(0, REVISIONS_SHOWN).join(", ") || "-", more);
}

function showTraffic(interval) {
  const all = interval.adapters();
  const rows = all.slice(0, ADAPTERS_SHOWN).map((row) => [
    row.tenant,
    row.adapter || "base model",
    rate(row.requests),
    rate(row.tokens, 0),
    row.ended ? milliseconds(row.waited / row.ended) : "-",
    whole(row.total),
  ]);
  if (all.length > rows.length) rows.push([`and ${all.length - rows.length} more`, "", "", "", "", ""]);
  const heads = columns("tenant*", "adapter*", "requests/s", "tokens/s", "TTFT ms, mean", "requests");
  showTable("traffic", "traffic-title", heads, rows, "No request has ended yet.");
}

function showTenants(interval) {
  const sums = new Map();
  const of = (tenant) => {
    if (!sums.has(tenant)) sums.set(tenant, { waiting: 0, running: 0, requests: 0, tokens: 0 });
    return sums.get(tenant);
  };
  for (const { tenant, waiting, running } of interval.now.tenants) {
    of(tenant).waiting += waiting;
    of(tenant).running += running;
  }
  for (const { tenant, requests, tokens } of interval.adapters()) {
    of(tenant).requests += requests;
    of(tenant).tokens += tokens;
  }
  const all = [...sums].sort(([, one], [, other]) => other.waiting - one.waiting || other.tokens - one.tokens);
  const rows = all.slice(0, TENANTS_SHOWN).map(([tenant, { waiting, running, requests, tokens }]) => [
    tenant, whole(waiting), whole(running), rate(requests), rate(tokens, 0),
  ]);
  if (all.length > rows.length) rows.push([`and ${all.length - rows.length} more`, "", "", "", ""]);
  const heads = columns("tenant*", "waiting", "running", "requests/s", "tokens/s");
  showTable("tenants", "tenants-title", heads, rows, "No tenant has sent a request yet.");
}

function showQueues(queues) {
  const several = new Set(queues.map(({ cell }) => cell)).size > 1;
  const name = ({ model, cell }) => (several ? `${model} (cell ${cell})` : model);
  const rows = queues.map((queue) => [name(queue), whole(queue.waiting), whole(queue.running)]);
  showTable("queues", "models-title", columns("model*", "waiting", "running"), rows, "No model is served.");
}

function showRouters(interval) {
  const rows = interval.now.routers.map(({ address, traffic, error }) => {
    if (error) return [address, error.message, "", ""];
    return [address, "serves", whole(traffic.open), duration(traffic.uptime)];
  });
  showTable("routers", "routers-title", columns("router*", "state*", "open", "up"), rows, "");
}

/** Return columns of these titles; one that ends with `*` has names and aligns left. */
export const columns = (...titles) => titles.map((title) => ({ title: title.replace("*", ""), name: title.endsWith("*") }));

export const whole = (value) => value.toLocaleString("en");
const rate = (value, digits = 1) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const percent = (part, all) => (all ? `${rate((100 * part) / all, 0)}%` : "-");
const mebibytes = (bytes) => rate(bytes / 2 ** 20);
const milliseconds = (seconds) => (seconds === null ? "-" : rate(seconds * 1e3, seconds < 0.1 ? 1 : 0));

function duration(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes >= 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return minutes ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.floor(seconds)} s`;
}
