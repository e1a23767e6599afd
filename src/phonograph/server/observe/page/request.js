// The page of one request: what became of each of its choices. Data goes in as text, never as markup.

import { $, Bar, LockedError, ask, askForKey, cells, count, make, notice, onKey, reveal, seconds, showState, sync, table, whole, write } from "./parts.js";

const EVERY = 1000;
const id = decodeURIComponent(location.pathname.replace(/^\/requests\//, ""));

write($("name"), id);
document.title = `${id} · phonograph`;

/** Pairs of name and value as a list; what has no value is left out. */
function showPairs(list, pairs) {
  sync(list, pairs.filter(([, value]) => value !== null && value !== undefined), ([name]) => name, ([name]) => {
    const pair = make("div");
    pair.append(make("dt", "", name), make("dd", "num"));
    return pair;
  }, (node, [, value]) => write(node.lastChild, String(value)));
}

class ChoiceCard {
  constructor(trace) {
    this.node = make("article", "tile");
    const head = make("div", "phase-head");
    this.badge = make("span", "badge");
    head.append(make("h2", "", `Choice ${trace.index}`), this.badge);
    this.node.append(head);
    this.bar = new Bar(this.node);
    this.figures = make("dl", "totals");
    [this.holder, this.body] = table("Passes", ["passes", "replayed", "eager", "reason"], "passes");
    this.node.append(this.figures, make("h3", "", "Passes of the model"), this.holder);
  }

  show(trace) {
    write(this.badge, trace.finish);
    const { admitted, first_token: first, ended } = trace;
    const queued = admitted ?? ended;
    const prompt = admitted === null ? 0 : (first ?? ended) - admitted;
    const output = first === null ? 0 : ended - first;
    this.bar.show([
      ["free", queued, `queued ${seconds(queued)}`],
      ["cached", prompt, `first token ${seconds(prompt)}`],
      ["used", output, `output ${seconds(output)}`],
    ]);
    const speed = output > 0 && trace.output_tokens > 1 ? `${((trace.output_tokens - 1) / output).toFixed(1)}/s` : null;
    showPairs(this.figures, [
      ["prompt tokens", whole.format(trace.prompt_tokens)],
      ["of them cached", whole.format(trace.cached_tokens)],
      ["output tokens", whole.format(trace.output_tokens)],
      ["tokens per second", speed],
      ["preempted", trace.preemptions ? count(trace.preemptions) : null],
      ["in all", seconds(ended)],
    ]);
    const rows = [...trace.prompt.map((one) => ["prompt", one]), ...trace.output.map((one) => ["output", one])];
    const lines = rows.flatMap(([part, one]) => lineOf(part, one));
    sync(this.body, lines, (line) => line.key, () => cells(["", "num", "num", "detail"]), (row, line) => {
      write(row.cells[0], line.name);
      write(row.cells[1], line.replayed);
      write(row.cells[2], line.eager);
      write(row.cells[3], line.why);
    });
  }
}

/** Rows for the passes of a phase: one for replays, one for each reason of eager ones. */
function lineOf(part, one) {
  const name = `${part}: ${one.phase}`;
  const lines = one.replayed ? [{ key: `${name} replayed`, name, replayed: count(one.replayed), eager: "", why: "" }] : [];
  for (const [reason, calls] of Object.entries(one.eager)) {
    const why = one.details[reason] ? `${reason}: ${one.details[reason]}` : reason;
    lines.push({ key: `${name} ${reason}`, name, replayed: "", eager: count(calls), why });
  }
  return lines;
}

const cards = new Map();

function show(story) {
  const { line, traces } = story;
  showState(line.state);
  write($("facts"), `arrived ${new Date(line.at * 1000).toLocaleString()}`);
  showPairs($("request"), [
    ["prompt tokens", whole.format(line.prompt_tokens)],
    ["output tokens", whole.format(line.output_tokens)],
    ["choices", whole.format(story.choices)],
    ["most output tokens", whole.format(story.max_tokens)],
    ["time", seconds(line.seconds)],
    ["eager passes", count(line.eager)],
    ["priority", story.priority || null],
    ["deadline", story.deadline === null ? null : seconds(story.deadline)],
  ]);
  showPairs($("sampling"), [...Object.entries(story.sampling).map(([name, value]) => [name.replaceAll("_", " "), value]), ["grammar", story.grammar]]);
  $("waiting").hidden = traces.length > 0;
  sync($("choices"), traces, (trace) => trace.index, (trace) => {
    cards.set(trace.index, new ChoiceCard(trace));
    return cards.get(trace.index).node;
  }, (node, trace) => cards.get(trace.index).show(trace));
  return line.state === "active";
}

async function poll() {
  try {
    const story = await ask(`/request.json?id=${encodeURIComponent(id)}`);
    reveal();
    notice("");
    if (show(story)) setTimeout(poll, EVERY);
  } catch (error) {
    if (error instanceof LockedError) return askForKey(error.message);
    showState(error.status === 404 ? "not kept" : "not reachable");
    notice(error.status === 404 ? error.message : `No answer from the server (${error.message}).`);
    if (error.status !== 404) setTimeout(poll, 5 * EVERY);
  }
}

onKey(poll);
poll();
