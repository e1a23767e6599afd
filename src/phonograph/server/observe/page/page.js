// The status page: asks the server once a second and shows what it says. Data goes in as text, never as markup.

import { $, Bar, LockedError, ask, askForKey, bytes, cells, count, duration, make, notice, onKey, rate, reveal, seconds, share, short, showState, sync, table, whole, write } from "./parts.js";
import { Plot } from "./plot.js";
import { showSpeculation } from "./speculation.js";

const SPAN = 600;
const LATELY = 5;
const FEW = 8;
const EVERY = 1000;
const SLOWEST = 5000;

// -- tiles ------------------------------------------------------------------------------------------------------

class Tile {
  constructor(id, title, plot, hasBar = false) {
    const holder = $(id);
    holder.append(make("h2", "", title));
    const line = make("p", "figure");
    this.value = make("strong", "num", "–");
    this.unit = make("span", "unit");
    line.append(this.value, this.unit);
    this.more = make("p", "more num");
    holder.append(line, this.more);
    this.bar = hasBar ? new Bar(holder) : null;
    this.plot = new Plot(holder, { title, span: SPAN, ...plot });
  }

  show(value, unit, more) {
    write(this.value, value);
    write(this.unit, unit);
    write(this.more, more);
  }
}

const tiles = {
  output: new Tile("tile-output", "Throughput", {
    series: [{ key: "output_rate", label: "generated", area: true }, { key: "prompt_rate", label: "prompt" }],
    format: (value) => `${rate(value)}/s`,
  }),
  first: new Tile("tile-first", "Time to first token", {
    series: [{ key: "first_token_p50", label: "p50" }, { key: "first_token_p95", label: "p95" }],
    format: seconds,
    log: true,
  }),
  gap: new Tile("tile-gap", "Inter-token latency", {
    series: [{ key: "token_gap_p50", label: "p50" }, { key: "token_gap_p95", label: "p95" }],
    format: seconds,
    log: true,
  }),
  requests: new Tile("tile-requests", "Requests", {
    series: [{ key: "running", label: "running", area: true }, { key: "waiting", label: "waiting" }],
    format: (value) => rate(value).replace(/\.0$/, ""),
  }, true),
  cache: new Tile("tile-cache", "KV cache", {
    series: [{ key: "kv_use", label: "used", area: true }],
    format: share,
    ceiling: 1,
  }, true),
  prefix: new Tile("tile-prefix", "Prefix cache", {
    series: [{ key: "prefix_hits", label: "found", area: true }],
    format: share,
    ceiling: 1,
  }, true),
};

// -- what the server said ---------------------------------------------------------------------------------------

let samples = [];
let nextSample = 0;
let serverStarted = null;

function takeHistory(status) {
  if (serverStarted !== status.started) {
    serverStarted = status.started;
    samples = [];
  }
  const { columns, rows } = status.history;
  for (const row of rows) samples.push(Object.fromEntries(columns.map((name, index) => [name, row[index]])));
  samples = samples.slice(-SPAN);
  nextSample = status.history.first + rows.length;
}

function showTop({ facts, health, uptime }) {
  write($("uptime"), duration(uptime));
  showState(health.state);
  notice(health.reason);
  if (!facts) return;
  write($("model"), facts.model);
  document.title = `${facts.model} · phonograph`;
  const parts = [facts.device, facts.dtype, `${facts.architecture}, ${facts.num_layers} layers`];
  if (facts.implementation.startsWith("hf:")) parts.push("layers of transformers");
  parts.push(`up to ${whole.format(facts.max_seqs)} sequences of ${whole.format(facts.max_len)} tokens`);
  write($("facts"), parts.join(" · "));
  $("facts").title = facts.implementation;
  write($("version"), `phonograph ${facts.version}`);
}

function spread(tile, found) {
  const more = `p95 ${seconds(found.p95)}   p99 ${seconds(found.p99)}`;
  tile.show(seconds(found.p50), "p50, last minute", found.count ? more : "nothing in the last minute");
}

/** The mean of the last seconds: one second alone jumps. */
function lately(column) {
  const recent = samples.slice(-LATELY);
  return recent.reduce((sum, sample) => sum + sample[column], 0) / Math.max(1, recent.length);
}

function showTiles(status) {
  const { latencies, cache, totals } = status;
  tiles.output.show(rate(lately("output_rate")), "tokens/s", `prompt ${rate(lately("prompt_rate"))} tokens/s`);
  showRequests(status);
  spread(tiles.first, latencies.first_token);
  spread(tiles.gap, latencies.token_gap);
  if (cache) showCache(cache, totals);
  for (const tile of Object.values(tiles)) tile.plot.show(samples);
}

function showRequests({ running, waiting, totals, facts }) {
  const rejected = Object.values(totals.rejected).reduce((sum, value) => sum + value, 0);
  tiles.requests.show(count(running), "running", `${count(totals.requests)} in all   ${count(rejected)} rejected`);
  const free = facts ? Math.max(0, facts.max_seqs - running) : 0;
  tiles.requests.bar.show([
    ["used", running, `${count(running)} running`],
    ["free", free, `${count(free)} rows free`],
    ["none", 0, `${count(waiting)} waiting`],
  ]);
}

function showCache(cache, totals) {
  const size = (pages) => short.format(pages * cache.page_size);
  tiles.cache.show(share(cache.used / cache.total), "in use", `of ${size(cache.total)} tokens in ${whole.format(cache.total)} pages`);
  tiles.cache.bar.show([
    ["used", cache.used, `used ${size(cache.used)}`],
    ["cached", cache.cached, `cached ${size(cache.cached)}`],
    ["free", cache.free, `free ${size(cache.free)}`],
  ]);
  const hits = cache.lookup_tokens ? cache.hit_tokens / cache.lookup_tokens : 0;
  tiles.prefix.show(share(hits), "of prompt tokens found", `${count(totals.preemptions)} preemptions`);
  tiles.prefix.bar.show([
    ["used", cache.hit_tokens, `found ${short.format(cache.hit_tokens)}`],
    ["free", cache.lookup_tokens - cache.hit_tokens, `computed ${short.format(cache.lookup_tokens - cache.hit_tokens)}`],
  ]);
}

// -- phases -----------------------------------------------------------------------------------------------------

class PhaseCard {
  constructor(phase) {
    this.node = make("article", "tile phase");
    const head = make("div", "phase-head");
    this.title = make("h2", "", phase.name);
    this.backend = make("span", "badge");
    this.summary = make("p", "more num");
    head.append(this.title, this.backend, this.summary);
    this.node.append(head);
    this.bar = new Bar(this.node);
    this.table = this.makeTable(phase);
    this.toggle = make("button", "quiet");
    this.toggle.type = "button";
    this.all = false;
    this.toggle.addEventListener("click", () => {
      this.all = !this.all;
      this.show(this.phase);
    });
    this.reasonsTitle = make("h3", "", "Eager steps");
    this.reasons = this.makeReasons(phase);
    this.none = make("p", "muted", "None.");
    this.noBuckets = make("p", "muted", "Nothing is recorded.");
    this.failures = make("ul", "failures");
    this.coverage = make("p", "muted");
    this.gaps = make("ul", "gaps");
    this.node.append(this.reasonsTitle, this.none, this.reasonsHolder);
    this.node.append(make("h3", "", "Buckets"), this.coverage, this.gaps);
    this.node.append(this.noBuckets, this.tableHolder, this.failures, this.toggle);
  }

  makeTable(phase) {
    const head = [phase.dim, "axes", "graphs", "memory", "replays", "padding"];
    [this.tableHolder, this.body] = table(`Buckets of ${phase.name}`, head, "buckets");
    return this.body;
  }

  makeReasons(phase) {
    [this.reasonsHolder, this.reasonsBody] = table(`Reasons of eager steps of ${phase.name}`, ["reason", "steps", "latest"], "reasons");
    return this.reasonsBody;
  }

  show(phase) {
    this.phase = phase;
    const replays = phase.recordings.reduce((sum, made) => sum + made.replays, 0);
    const eager = phase.eager.reduce((sum, why) => sum + why.calls, 0);
    write(this.backend, phase.backend);
    const spent = Object.entries(phase.device_seconds).map(([path, value]) => `${path} ${duration2(value)}`);
    const facts = [spent.length ? `device time: ${spent.join(", ")}` : "", phase.verified ? `verified: ${phase.verified}` : ""];
    write(this.summary, facts.filter(Boolean).join("; "));
    const isOff = phase.backend === "disabled";
    // Where nothing is to be recorded, as on a CPU, eager steps are how it should be.
    this.bar.show(isOff ? [["used", eager, `${count(eager)} steps, all eager: nothing is recorded here`]] : [
      ["replayed", replays, `${count(replays)} replayed${replays + eager ? ` (${share(replays / (replays + eager))})` : ""}`],
      ["eager", eager, `${count(eager)} eager`],
    ]);
    this.showCoverage(phase);
    this.showBuckets(phase);
    this.showReasons(phase);
  }

  /** Which batches that may come have a graph; null for a phase that serves no requests. */
  showCoverage(phase) {
    const found = phase.backend === "disabled" ? null : phase.coverage;
    this.coverage.hidden = !found;
    const worst = found && found.worst_padded ? `; worst padding: ${found.worst_used} in ${found.worst_padded}` : "";
    const products = found && found.products > 1 ? ` × ${found.products} products` : "";
    const sizes = found ? `${phase.dim} ${found.smallest} to ${found.largest}${products}` : "";
    write(this.coverage, found ? `${sizes}: ${count(found.covered)} of ${count(found.batches)} have a graph${worst}` : "");
    sync(this.gaps, found ? found.gaps : [], (gap) => gap, () => make("li"), write);
  }

  /** The most replayed buckets and those that failed, or all of them; by size. */
  showBuckets(phase) {
    const all = phase.recordings;
    const busiest = [...all].sort((one, other) => other.replays - one.replays).slice(0, FEW);
    const chosen = new Set(busiest.filter((made) => made.replays));
    const shown = all.filter((made) => this.all || isGone(made) || chosen.has(made));
    this.tableHolder.hidden = !shown.length;
    this.tableHolder.classList.toggle("no-axes", all.every((made) => !made.axes));
    this.toggle.hidden = !all.length || (!this.all && shown.length === all.length);
    const more = chosen.size ? `Show all ${all.length} buckets` : `None replayed yet. Show all ${all.length} buckets`;
    write(this.toggle, this.all ? "Show fewer" : more);
    this.toggle.setAttribute("aria-expanded", String(this.all));
    this.noBuckets.hidden = all.length > 0;
    const most = Math.max(1, ...all.map((made) => made.replays));
    sync(this.body, shown, (made) => made.label, bucketRow, (row, made) => fillBucket(row, made, most));
    const failed = all.filter(isGone);
    const why = (made) => (made.error ? `stays eager: ${made.error}` : `given back: ${made.mistrusted}`);
    sync(this.failures, failed, (made) => made.label, () => make("li"), (item, made) => write(item, why(made)));
  }

  showReasons(phase) {
    this.reasonsHolder.hidden = !phase.eager.length;
    this.none.hidden = phase.eager.length > 0;
    const sorted = [...phase.eager].sort((one, other) => other.calls - one.calls);
    sync(this.reasonsBody, sorted, (why) => why.reason, () => cells(["", "num", "detail"]), (row, why) => {
      write(row.cells[0], why.reason);
      write(row.cells[1], count(why.calls));
      write(row.cells[2], why.detail);
    });
  }
}

const duration2 = (value) => (value < 60 ? `${value.toFixed(1)} s` : duration(value));

function bucketRow() {
  const row = cells(["num", "", "num", "num", "num replays", "num"]);
  const text = make("span");
  const meter = make("span", "meter");
  meter.append(make("span", "fill"));
  row.cells[4].append(text, meter);
  return row;
}

/** Whether it can't be replayed: its capture failed, or a check in service found it wrong. */
const isGone = (made) => Boolean(made.error || made.mistrusted);

function fillBucket(row, made, most) {
  write(row.cells[0], whole.format(made.size));
  write(row.cells[1], made.axes || "–");
  row.classList.toggle("failed", isGone(made));
  write(row.cells[2], isGone(made) ? "–" : whole.format(made.num_graphs));
  write(row.cells[3], isGone(made) ? "–" : bytes(made.num_bytes));
  const [text, meter] = row.cells[4].children;
  write(text, count(made.replays));
  meter.firstChild.style.width = `${(100 * made.replays) / most}%`;
  const rows = made.replays * made.size;
  write(row.cells[5], rows ? share(1 - made.used_rows / rows) : made.error ? "failed" : "–");
}

const cards = new Map();

/** The idle phase keeps ranks together; where there is one rank it does nothing worth showing. */
const isShown = (phase) => phase.name !== "idle" || phase.eager.length > 0 || phase.recordings.some((made) => made.replays);

function showPhases(phases) {
  sync($("phases"), phases.filter(isShown), (phase) => phase.name, (phase) => {
    cards.set(phase.name, new PhaseCard(phase));
    return cards.get(phase.name).node;
  }, (node, phase) => cards.get(phase.name).show(phase));
}

// -- the rest ---------------------------------------------------------------------------------------------------

function showTotals({ totals }) {
  const rows = [
    ["requests", totals.requests],
    ...Object.entries(totals.finished).filter(([name, value]) => value || name === "stop" || name === "length").map(([name, value]) => [`ended: ${name}`, value]),
    ...Object.entries(totals.rejected).map(([name, value]) => [`rejected: ${name.replaceAll("_", " ")}`, value]),
    ["prompt tokens", totals.prompt_tokens],
    ["generated tokens", totals.generated_tokens],
    ["steps", totals.steps],
    ["preemptions", totals.preemptions],
    ["core restarts", totals.core_restarts],
    ...(totals.shadow_checks ? [["steps checked", totals.shadow_checks], ["wrong replays", totals.shadow_mismatches]] : []),
  ];
  sync($("totals"), rows, ([name]) => name, ([name]) => {
    const pair = make("div");
    pair.append(make("dt", "", name), make("dd", "num"));
    return pair;
  }, (node, [, value]) => write(node.lastChild, whole.format(value)));
}

const [latestHolder, latestBody] = table("Latest requests", ["request", "arrived", "state", "prompt", "output", "time", "eager"], "lines");
$("latest").append(latestHolder);

function requestRow(one) {
  const row = cells(["", "num", "", "num", "num", "num", "num"]);
  // What tells ids apart is their end.
  const link = make("a", "", one.id.replace(/^([a-z]+-).{8,}(.{8})$/, "$1…$2"));
  link.title = one.id;
  link.href = `/requests/${encodeURIComponent(one.id)}`;
  row.cells[0].append(link);
  return row;
}

function showRequestList({ requests }) {
  $("no-requests").hidden = requests.length > 0;
  latestHolder.hidden = !requests.length;
  sync(latestBody, requests, (one) => one.id, requestRow, (row, one) => {
    write(row.cells[1], new Date(one.at * 1000).toLocaleTimeString());
    write(row.cells[2], one.state);
    write(row.cells[3], count(one.prompt_tokens));
    write(row.cells[4], one.state === "active" ? "–" : count(one.output_tokens));
    write(row.cells[5], seconds(one.seconds));
    write(row.cells[6], one.state === "active" ? "–" : count(one.eager));
  });
}

function showIncidents({ incidents }) {
  $("no-incidents").hidden = incidents.length > 0;
  sync($("incidents"), incidents, (one) => `${one.at} ${one.text}`, (one) => {
    const item = make("li", one.level);
    item.append(make("time", "num"), make("span", "level", one.level), make("span", "times num"), make("span", "text", one.text));
    return item;
  }, (node, one) => {
    const when = new Date(one.at * 1000);
    node.firstChild.dateTime = when.toISOString();
    write(node.firstChild, when.toLocaleTimeString());
    write(node.children[2], one.count > 1 ? `× ${one.count}` : "");
  });
}

function show(status) {
  takeHistory(status);
  showTop(status);
  showTiles(status);
  showSpeculation(status);
  showPhases(status.phases);
  showRequestList(status);
  showTotals(status);
  showIncidents(status);
}

// -- asking -----------------------------------------------------------------------------------------------------

let failures = 0;
let timer = null;

async function poll() {
  timer = null;
  try {
    const since = serverStarted === null ? 0 : nextSample;
    const status = await ask(`/status.json?since=${since}`);
    if (serverStarted !== null && serverStarted !== status.started && since > 0) {
      serverStarted = null;
      return again(0);
    }
    reveal();
    show(status);
    failures = 0;
  } catch (error) {
    if (error instanceof LockedError) return askForKey(error.message);
    failures += 1;
    showState("not reachable");
    notice(`No answer from the server (${error.message}). The figures below are the last ones known.`);
  }
  again(Math.min(EVERY * 2 ** Math.max(0, failures - 1), SLOWEST));
}

function again(wait) {
  if (timer === null && !document.hidden) timer = setTimeout(poll, wait);
}

onKey(() => again(0));

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && $("ask").hidden) again(0);
});

poll();
