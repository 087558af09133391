// The change between two states of the cluster. Routers count since their start, each for itself.

export class Interval {
  /** `before` is an earlier state, or null: then everything is since the routers' start. */
  constructor(now, before) {
    this.now = now;
    this.before = before;
    this.routers = now.routers.filter((router) => router.traffic).map((router) => {
      const earlier = before?.routers.find((other) => other.address === router.address)?.traffic;
      // A router that started between the states is counted from its start.
      const last = earlier && earlier.uptime < router.traffic.uptime ? earlier : null;
      return { address: router.address, now: router.traffic, last, seconds: seconds(router.traffic, last) };
    });
  }

  /** Return a counter's increase per second, over all routers. */
  perSecond(field) {
    return sum(this.routers.map(({ now, last, seconds }) => (now[field] - (last ? last[field] : 0)) / seconds));
  }

  /** Return how many requests ended per second, by status. */
  requests() {
    const counts = new Map();
    for (const { now, last, seconds } of this.routers) {
      for (const [code, count] of Object.entries(now.requests)) {
        counts.set(code, (counts.get(code) ?? 0) + (count - (last?.requests[code] ?? 0)) / seconds);
      }
    }
    return counts;
  }

  /** Return the sum of a value over all routers. */
  total(field) {
    return sum(this.routers.map(({ now }) => now[field]));
  }

  /** Return a quantile in seconds, interpolated like Prometheus's histogram_quantile; null without samples. */
  quantile(field, share) {
    if (!this.routers.length) return null;
    const bounds = this.routers[0].now[field].bounds;
    const counts = new Array(bounds.length + 1).fill(0);
    for (const { now, last } of this.routers) {
      if (now[field].counts.length !== counts.length) continue; // a router of another version
      now[field].counts.forEach((count, at) => { counts[at] += count - (last?.[field].counts[at] ?? 0); });
    }
    const total = sum(counts);
    let below = 0;
    for (const [at, count] of counts.entries()) {
      if (count && below + count >= share * total) {
        const low = at ? bounds[at - 1] : 0;
        const high = at < bounds.length ? bounds[at] : low;
        return low + ((high - low) * (share * total - below)) / count;
      }
      below += count;
    }
    return null;
  }

  /** Return a worker's steps per second; null if the earlier state lacks it. */
  steps(worker) {
    const earlier = this.before?.workers.find((other) => other.incarnation === worker.incarnation);
    const seconds = Math.max(0, ...this.routers.filter(({ last }) => last).map((router) => router.seconds));
    return earlier && seconds ? (worker.steps - earlier.steps) / seconds : null;
  }

  /** Return what each tenant's adapters did, over all routers, the busiest first. */
  adapters() {
    const rows = new Map();
    for (const { now, last, seconds } of this.routers) {
      const earlier = new Map((last?.adapters ?? []).map((row) => [key(row), row]));
      for (const row of now.adapters) {
        const before = earlier.get(key(row)) ?? NOTHING;
        const sums = rows.get(key(row)) ?? { tenant: row.tenant, adapter: row.adapter, ...ZEROS };
        const requests = row.requests - before.requests;
        sums.total += row.requests;
        sums.ended += requests;
        sums.requests += requests / seconds;
        sums.tokens += (row.completion_tokens - before.completion_tokens) / seconds;
        sums.waited += row.time_to_first_token - before.time_to_first_token;
        rows.set(key(row), sums);
      }
    }
    return [...rows.values()].sort((one, other) => other.tokens - one.tokens || other.total - one.total);
  }
}

const NOTHING = { requests: 0, completion_tokens: 0, time_to_first_token: 0 };
const ZEROS = { total: 0, ended: 0, requests: 0, tokens: 0, waited: 0 };

const sum = (values) => values.reduce((one, other) => one + other, 0);
const seconds = (now, last) => Math.max(1e-3, now.uptime - (last ? last.uptime : 0));
const key = (row) => JSON.stringify([row.tenant, row.adapter]);
