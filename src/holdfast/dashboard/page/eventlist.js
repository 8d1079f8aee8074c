// The list of events: newest first, with a filter, and the reason of every decision.

import { byId, clock, make, moment, put, whole } from "./format.js";

const BAD = new Set(["worker_exited", "server_exited", "server_hung", "slices_lost", "hung", "lost", "failed", "evicted", "corruption", "distrusted", "script_mistake", "inexact", "rewound", "skipped"]);
const WARN = new Set(["slow", "server_slow", "failover", "waiting", "warning", "ledger_down", "storage_down"]);
const GOOD = new Set(["recovered", "joined", "checkpoint", "finished", "run_finished", "resumed", "ledger_up", "storage_up", "no_longer_slow", "server_no_longer_slow", "early_stop"]);
const ROUTINE = new Set(["progress", "rebalanced", "registered", "spent", "serving", "staleness"]);
const SHOWN = 60;
const HARMLESS = /^ended: (finished|left|stopped)/;

export class EventList {
  constructor(story) {
    this.story = story;
    this.shown = SHOWN;
    this.nodes = new Map();
    const again = () => { this.shown = SHOWN; this.render(); };
    for (const id of ["filter", "kind", "about", "reasons"]) byId(id).addEventListener("input", again);
    byId("more").addEventListener("click", () => { this.shown += 200; this.render(); });
    document.addEventListener("keydown", (event) => this.#key(event));
  }

  #key(event) {
    const field = byId("filter");
    const typing = event.target.matches?.("input, select, textarea");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      field.focus();
      field.select();
    } else if (event.key === "Escape" && event.target === field) {
      field.value = "";
      field.blur();
      this.render();
    }
  }

  render() {
    const { story } = this;
    this.#choices();
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const kind = byId("kind").value, about = byId("about").value, decisions = byId("reasons").checked;
    const found = story.events.filter((event) => {
      if (kind === "" ? ROUTINE.has(event.kind) : kind !== "*" && event.kind !== kind) return false;
      if (about && event.who !== about) return false;
      if (decisions && !event.reason && !event.decided) return false;
      if (!words.length) return true;
      const text = `${event.kind} ${event.who} ${event.text} ${event.reason ?? ""} step ${event.step ?? ""}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const list = byId("list");
    const wanted = found.slice(0, this.shown);
    const kept = new Map();
    let place = list.firstChild;
    for (const event of wanted) {
      const node = this.nodes.get(event.n) ?? this.#node(event);
      kept.set(event.n, node);
      if (node === place) place = place.nextSibling;
      else list.insertBefore(node, place);
    }
    while (place) { const next = place.nextSibling; place.remove(); place = next; }
    this.nodes = kept;
    byId("more").hidden = found.length <= this.shown;
    byId("events-empty").hidden = found.length > 0;
    put("events-empty", story.events.length ? "No event matches." : "Nothing has happened yet.");
    const total = story.header?.events ?? 0;
    put("events-note", `${whole.format(found.length)} of the newest · ${whole.format(total)} in all`);
  }

  #choices() {
    const kinds = Object.keys(this.story.counts).sort();
    fill(byId("kind"), kinds.map((kind) => [kind, `${kind.replaceAll("_", " ")} (${whole.format(this.story.counts[kind])})`]));
    const workers = [...new Set(this.story.events.map((event) => event.who))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    fill(byId("about"), workers.map((worker) => [worker, worker]));
  }

  #node(event) {
    const bad = BAD.has(event.kind) && !HARMLESS.test(event.text);
    const tone = bad ? "bad" : WARN.has(event.kind) ? "warn" : GOOD.has(event.kind) ? "good" : "";
    const what = make("div", { class: "what" }, event.text);
    if (event.step !== undefined) what.append(" ", make("span", { class: "at" }, `step ${whole.format(event.step)}`));
    if (event.reason) what.append(make("span", { class: "why" }, event.reason));
    if (event.detail) what.append(make("details", {}, make("summary", {}, "Stacks"), make("pre", {}, event.detail)));
    return make("li", { class: tone },
      make("time", { dateTime: new Date(event.t * 1000).toISOString(), title: moment(event.t) }, clock(event.t)),
      make("span", { class: "kind" }, event.kind.replaceAll("_", " ")),
      make("span", { class: "who" }, event.who), what);
  }
}

function fill(select, choices) {
  const fixed = [...select.options].filter((option) => "fixed" in option.dataset);
  const now = [...select.options].slice(fixed.length);
  const chosen = select.value;
  if (now.length === choices.length && choices.every(([value, label], i) => now[i].value === value && now[i].textContent === label)) return;
  if (document.activeElement === select && now.length) return; // not under somebody's hand
  select.replaceChildren(...fixed, ...choices.map(([value, label]) => make("option", { value }, label)));
  select.value = [...select.options].some((option) => option.value === chosen) ? chosen : "";
}
