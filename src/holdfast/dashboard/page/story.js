// What the page knows of the run: the first picture, and the changes that were put upon it since.

export const STATES = ["computing", "slow", "recovering", "joining", "spare", "paused", "dead", "gone", "serving"];
const GROUPS = ["workers", "servers", "slices"];
const EVENTS_MAX = 1200;

export class Story {
  constructor() {
    this.clear();
  }

  clear() {
    this.known = false;
    this.run = { name: "", host: "", script: "" };
    this.header = null;
    this.lanes = [];
    this.series = {};
    this.marks = [];
    this.crew = [];
    this.servers = [];
    this.slices = [];
    this.facts = {};
    this.stored = null;
    this.checkpoints = [];
    this.events = [];
    this.counts = {};
    this.accounts = null;
    this.reading = null;
  }

  // Returns the names of what has changed.
  apply(picture) {
    const changed = new Set(["header"]);
    this.run = picture.run;
    if (picture.reading) {
      this.reading = picture.reading;
      return changed;
    }
    this.reading = null;
    if (picture.since === 0) {
      this.clear();
      this.run = picture.run;
      this.known = true;
      ["lanes", "series", "marks", "crew", "servers", "facts", "checkpoints", "events"].forEach((name) => changed.add(name));
    }
    this.header = picture.header;
    this.counts = picture.counts;
    if (picture.lanes.length) this.#lanes(picture.lanes, changed);
    for (const [name, part] of Object.entries(picture.series)) {
      const before = this.series[name] ?? [];
      before.length = part.from;
      this.series[name] = before.concat(part.points);
      changed.add("series");
    }
    for (const name of ["marks", "crew", "servers", "slices", "facts", "checkpoints", "stored", "accounts"]) {
      if (picture[name] !== undefined) {
        this[name] = picture[name];
        changed.add(name);
      }
    }
    if (picture.events.length) {
      this.events = picture.events.concat(this.events);
      if (this.events.length > EVENTS_MAX) this.events.length = EVENTS_MAX;
      changed.add("events");
    }
    return changed;
  }

  #lanes(lanes, changed) {
    const place = new Map(this.lanes.map((lane, index) => [`${lane.group} ${lane.name}`, index]));
    for (const lane of lanes) {
      const index = place.get(`${lane.group} ${lane.name}`);
      if (index === undefined) this.lanes.push(lane);
      else this.lanes[index] = lane;
    }
    const key = (lane) => { // workers and servers by host and slot, slices by kind and number
      const [first, second] = lane.group === "slices" ? lane.name.split("/") : lane.name.slice(1).split("@").reverse();
      return second === undefined ? [GROUPS.indexOf(lane.group), "", Number(first) || 0] : [GROUPS.indexOf(lane.group), first, Number(second) || 0];
    };
    this.lanes.sort((a, b) => {
      const [one, two] = [key(a), key(b)];
      return one[0] - two[0] || (one[1] < two[1] ? -1 : one[1] > two[1] ? 1 : one[2] - two[2]);
    });
    changed.add("lanes");
  }

  get from() {
    return this.header?.began ?? 0;
  }

  get until() {
    return Math.max(this.header?.now ?? 0, this.from + 1);
  }
}
