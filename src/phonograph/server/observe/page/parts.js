// What the pages share: words for figures, pieces of a page, and asking the server. Data goes in as text, never as markup.

const KEY = "phonograph-api-key";
const SLOWEST = 5000;

export const $ = (id) => document.getElementById(id);

// -- words for figures ------------------------------------------------------------------------------------------

export const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const count = (value) => (value < 100000 ? whole.format(value) : short.format(value));
export const rate = (value) => (value < 10 ? value.toFixed(1) : whole.format(value));
export const share = (value) => (value > 0 && value < 0.001 ? "< 0.1 %" : `${(100 * value).toFixed(value >= 0.9995 || value === 0 ? 0 : 1)} %`);

export function seconds(value) {
  if (value === null) return "–";
  if (value < 0.01) return `${(1000 * value).toFixed(1)} ms`;
  if (value < 1) return `${(1000 * value).toFixed(0)} ms`;
  return value < 10 ? `${value.toFixed(2)} s` : `${value.toFixed(1)} s`;
}

export function duration(value) {
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const at = units.findIndex(([, size]) => value >= size);
  if (at === -1) return "0 s";
  const first = Math.floor(value / units[at][1]);
  const next = units[at + 1];
  const rest = next ? Math.floor((value % units[at][1]) / next[1]) : 0;
  return `${first} ${units[at][0]}${rest ? ` ${rest} ${next[0]}` : ""}`;
}

export function bytes(value) {
  for (const unit of ["B", "kB", "MB"]) {
    if (value < 999.5) return `${value < 10 && unit !== "B" ? value.toFixed(1) : Math.round(value)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} GB`;
}

// -- pieces of the page -----------------------------------------------------------------------------------------

export function make(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Keep one child for each item, in the items' order: a node that stays is not made again. */
export function sync(parent, items, key, create, update) {
  const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  items.forEach((item, index) => {
    const name = String(key(item));
    let node = old.get(name);
    if (node) old.delete(name);
    else {
      node = create(item);
      node.dataset.key = name;
    }
    update(node, item);
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
  });
  for (const node of old.values()) node.remove();
}

/** A bar of parts that add up to one; `parts` is a list of [class, share, label]. */
export class Bar {
  constructor(holder) {
    this.bar = make("div", "bar");
    this.bar.setAttribute("role", "img");
    this.legend = make("p", "legend");
    holder.append(this.bar, this.legend);
  }

  show(parts) {
    sync(this.bar, parts, ([name]) => name, ([name]) => make("span", `part ${name}`), (node, [, size]) => {
      node.style.flexGrow = String(size);
      node.hidden = size <= 0;
    });
    sync(this.legend, parts, ([name]) => name, ([name]) => make("span", `key ${name}`), (node, [, , text]) => write(node, text));
    this.bar.setAttribute("aria-label", parts.map(([, , text]) => text).join(", "));
  }
}

export function table(title, columns, className) {
  const holder = make("div", "scroll");
  const made = make("table", className);
  made.append(make("caption", "hidden", title));
  const head = made.createTHead().insertRow();
  for (const name of columns) {
    const cell = make("th", ["axes", "reason", "latest", "request", "state", "passes", "meaning"].includes(name) ? "" : "num", name);
    cell.scope = "col";
    head.append(cell);
  }
  const body = made.createTBody();
  holder.append(made);
  return [holder, body];
}

export function cells(classes) {
  const row = make("tr");
  for (const name of classes) row.append(make("td", name));
  return row;
}

// -- asking -----------------------------------------------------------------------------------------------------

export class LockedError extends Error {}

/** JSON from the server, with the key of this tab; LockedError where it asks for another. */
export async function ask(path) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  // Without credentials the browser does not ask for a password of its own when the key is refused.
  const answer = await fetch(path, { headers, credentials: "omit", cache: "no-store", signal: AbortSignal.timeout(SLOWEST) });
  if (answer.status === 401 || answer.status === 403) throw new LockedError(key === null ? "" : "The server did not accept this key.");
  if (!answer.ok) {
    const told = await answer.json().catch(() => null);
    const error = new Error(told?.error?.message ?? `the server answered ${answer.status}`);
    error.status = answer.status;
    throw error;
  }
  return answer.json();
}

/** Show the form for a key. */
export function askForKey(problem) {
  sessionStorage.removeItem(KEY);
  showState("locked");
  $("main").hidden = true;
  $("ask").hidden = false;
  write($("ask-problem"), problem);
  $("key").focus();
}

export function onKey(go) {
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = $("key").value.trim();
    $("key").value = "";
    // A header holds nothing else, so no server has another key.
    if (!/^[\x21-\x7e]+$/.test(key)) return askForKey("The server did not accept this key.");
    sessionStorage.setItem(KEY, key);
    go();
  });
}

export function reveal() {
  $("ask").hidden = true;
  $("main").hidden = false;
}

export function showState(state) {
  $("state").className = `pill pill-${state.replaceAll(" ", "-")}`;
  write($("state"), state);
}

export function notice(text) {
  $("notice").hidden = !text;
  write($("notice"), text);
}
