// The card of speculation: who drafts, how much of it is accepted, why steps were plain, and what rounds cost.

import { $, Bar, cells, count, make, share, sync, table, write } from "./parts.js";

const MEANINGS = {
  grammar: "a grammar, or forbidden words of several tokens",
  request: "the request takes no drafts",
  cost: "rounds would not have paid",
  no_draft: "there was no draft to verify",
};

const each = (value) => `${(1000 * value).toFixed(value < 0.01 ? 2 : 1)} ms`;

class Card {
  constructor(holder) {
    const head = make("div", "phase-head");
    this.drafter = make("span", "badge");
    this.setting = make("p", "more");
    head.append(make("h2", "", "Speculation"), this.drafter, this.setting);
    const columns = make("div", "columns");
    columns.append(this.makeRounds(), this.makePlaces(), this.makePlain());
    holder.append(head, columns);
  }

  makeRounds() {
    const holder = make("div");
    const line = make("p", "figure");
    this.tokens = make("strong", "num", "–");
    line.append(this.tokens, make("span", "unit", "tokens a round"));
    this.rounds = make("p", "more num");
    holder.append(line, this.rounds, make("h3", "", "Steps"));
    this.bar = new Bar(holder);
    this.times = make("p", "more num times-of-passes");
    holder.append(make("h3", "", "Device time per pass"), this.times);
    return holder;
  }

  makePlaces() {
    const holder = make("div");
    const [places, body] = table("Accepted drafts by place in the round", ["place", "drafted", "accepted", "share"], "places");
    this.places = body;
    holder.append(make("h3", "", "Accepted, by place in the round"), places);
    return holder;
  }

  makePlain() {
    const holder = make("div");
    const [reasons, body] = table("Reasons of plain steps", ["reason", "steps", "meaning"], "reasons");
    [this.reasons, this.plain] = [reasons, body];
    this.none = make("p", "muted", "None.");
    this.probes = make("p", "more num probes");
    holder.append(make("h3", "", "Plain steps of sequences"), this.none, reasons, this.probes);
    return holder;
  }

  show(found, facts) {
    if (facts) {
      write(this.drafter, facts.drafter);
      this.drafter.title = facts.why;
      const drafts = `${facts.depth} ${facts.depth === 1 ? "draft" : "drafts"} a round`;
      write(this.setting, `${drafts}; rounds run ${facts.when}`);
    }
    write(this.tokens, found.rounds ? (found.tokens / found.rounds).toFixed(2) : "–");
    write(this.rounds, `${count(found.rounds)} rounds of sequences, ${count(found.tokens)} tokens`);
    this.showSteps(found);
    this.showPlaces(found);
    this.showPlain(found);
  }

  showSteps({ steps, times }) {
    const all = steps.round + steps.plain;
    const told = (value, name) => `${count(value)} ${name}${all ? ` (${share(value / all)})` : ""}`;
    this.bar.show([["used", steps.round, told(steps.round, "rounds")], ["cached", steps.plain, told(steps.plain, "plain")]]);
    const spent = [["round", "round"], ["plain", "plain step"]].filter(([kind]) => times[kind]?.passes);
    const words = spent.map(([kind, name]) => `${name} ${each(times[kind].seconds / times[kind].passes)}`);
    write(this.times, words.join("   ") || "not known yet");
  }

  showPlaces({ drafted, accepted }) {
    const rows = drafted.map((most, place) => ({ place, most, taken: accepted[place] }));
    sync(this.places, rows, ({ place }) => place, placeRow, (row, { place, most, taken }) => {
      write(row.cells[0], String(place + 1));
      write(row.cells[1], count(most));
      write(row.cells[2], count(taken));
      const [text, meter] = row.cells[3].children;
      write(text, most ? share(taken / most) : "–");
      meter.firstChild.style.width = `${most ? (100 * taken) / most : 0}%`;
    });
  }

  showPlain({ plain, probed, probed_tokens: tokens }) {
    const brought = probed ? `${count(probed)} probes: drafts would have brought ${(tokens / probed).toFixed(2)} tokens a round` : "";
    this.probes.hidden = !probed;
    write(this.probes, brought);
    const found = Object.entries(plain).filter(([, steps]) => steps).sort(([, one], [, other]) => other - one);
    this.none.hidden = found.length > 0;
    this.reasons.hidden = !found.length;
    sync(this.plain, found, ([reason]) => reason, () => cells(["", "num", "detail"]), (row, [reason, steps]) => {
      write(row.cells[0], reason.replaceAll("_", " "));
      write(row.cells[1], count(steps));
      write(row.cells[2], MEANINGS[reason] ?? "");
    });
  }
}

function placeRow() {
  const row = cells(["num", "num", "num", "num replays"]);
  const meter = make("span", "meter");
  meter.append(make("span", "fill"));
  row.cells[3].append(make("span"), meter);
  return row;
}

let card = null;

/** Hidden where nothing is drafted. */
export function showSpeculation({ speculation, facts }) {
  const holder = $("speculation");
  holder.hidden = !speculation;
  if (!speculation) return;
  card ??= new Card(holder);
  card.show(speculation, facts?.speculation);
}
