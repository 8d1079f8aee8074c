// The figures at the top, where the time went, the members and the checkpoints.

import { byId, bytes, clock, count, duration, make, moment, number, percent, put, whole } from "./format.js";

const STATE_WORDS = {
  running: "running", unattended: "no agent", finished: "finished", stopped: "stopped", starting: "starting",
};
const LEVELS = { "slow to answer": "level-warn", suspect: "level-warn", hung: "level-bad" };

export function showHeader(story) {
  const { header, run, reading } = story;
  put("name", run.host ? `${run.name} on ${run.host}` : run.name || "Holdfast");
  byId("reading").hidden = !reading;
  if (reading) {
    put("reading-text", `Reading the log: ${percent(reading.part, 0)}, ${count(reading.events, "event")}`);
    byId("reading-part").value = reading.part;
    if (!header) {
      put("state", "reading");
      put("step", whole.format(reading.step));
      put("steps", reading.steps ? `of ${whole.format(reading.steps)}` : "");
    }
  }
  if (!header) return;
  put("state", STATE_WORDS[header.state] ?? header.state);
  byId("state").dataset.state = header.state;
  showProgress(header);
  put("goodput", percent(header.goodput));
  put("failures", whole.format(header.failures));
  put("failures-note", failuresNote(header));
  put("rate", number(header.state === "running" || header.state === "finished" ? header.samples_per_s : 0));
  const metrics = Object.entries(header.metrics).slice(0, 2).map(([name, value]) => `${name} ${number(value)}`);
  put("rate-note", metrics.join(" · "));
  showSaved(header);
  put("workers", `${header.members} of ${header.size}`);
  const idle = story.crew.filter((one) => one.state === "spare").length;
  put("workers-note", [header.own_views ? "" : `view ${header.view}`, idle ? count(idle, "spare") : ""].filter(Boolean).join(" · "));
  showAlerts(header);
  const at = header.steps ? `${header.step}/${header.steps}` : header.step;
  const title = `${header.state === "running" ? `step ${at}` : header.state} · ${run.name}`;
  if (document.title !== title) document.title = title;
}

function showProgress(header) {
  put("step", whole.format(header.step));
  put("steps", header.steps ? `of ${whole.format(header.steps)}` : "");
  const part = header.steps ? Math.min(header.step / header.steps, 1) : 0;
  byId("fill").style.width = `${(part * 100).toFixed(2)}%`;
  byId("track").setAttribute("aria-valuenow", Math.round(part * 100));
  put("percent", header.steps ? percent(part, part < 0.1 ? 1 : 0) : "");
  const took = header.last - header.began;
  put("eta", header.eta_s !== null ? `about ${duration(header.eta_s)} left` : header.state === "finished" ? `in ${duration(took)}` : "");
  put("pace", header.steps_per_s && header.state === "running" ? `${number(header.steps_per_s)} steps/s` : "");
}

function failuresNote(header) {
  const parts = [];
  if (header.recoveries) {
    const [usual, worst] = [duration(header.recovery_median_s), duration(header.recovery_worst_s)];
    parts.push(usual === worst ? `back in ${usual}` : `back in ${usual}, worst ${worst}`);
  }
  if (header.evictions) parts.push(`${header.evictions} evicted`);
  if (header.rewinds) parts.push(count(header.rewinds, "rewind"));
  if (header.skipped) parts.push(`${count(header.skipped, "step")} skipped`);
  return parts.join(" · ") || "none so far";
}

function showSaved(header) {
  const saved = header.checkpoint;
  put("saved", saved ? whole.format(saved.step) : "–");
  const over = header.state === "finished" || header.state === "stopped";
  const when = saved && (over ? `at ${clock(saved.t)}` : `${duration(Math.max(0, header.now - saved.t))} ago`);
  put("saved-note", saved ? `${when}, ${bytes(saved.bytes)} in ${duration(saved.duration_s)}` : "none yet");
}

function showAlerts(header) {
  const alerts = [];
  if (header.state === "unattended") alerts.push(["", "No agent runs: training goes on, but the dead are not replaced."]);
  if (header.state === "stopped") alerts.push(["bad", `The run is stopped${header.ended ? `: ${header.ended}` : "; its agent was killed"}.`]);
  if (header.ledger_away && header.state === "running") alerts.push(["", "The ledger cannot be reached: the membership is frozen, training goes on."]);
  if (header.storage_away && header.state === "running") alerts.push(["", "Storage cannot be reached: training goes on, the newest snapshot waits in memory."]);
  if (header.waiting && header.state === "running") alerts.push(["", `Paused: ${header.waiting}`]);
  if (header.digests > 1) alerts.push(["bad", "The workers ended with different weights."]);
  if (header.state === "finished" && header.digest) alerts.push(["good", "Finished, with the same weights on every worker: ", header.digest]);
  const text = JSON.stringify(alerts);
  const box = byId("alerts");
  if (box.dataset.text === text) return;
  box.dataset.text = text;
  box.replaceChildren(...alerts.map(([kind, sentence, code]) => make("div", { class: `alert ${kind}` }, sentence, ...(code ? [make("code", {}, code)] : []))));
}

// -- where the time went -----------------------------------------------------------------------------------

const WORDS = {
  slow: "computing, slow", joining: "starting and joining", waiting: "waiting for slower ones", script: "after the loop",
  down: "nobody in the slot", loading: "loading batches",
};
const NOT_LOST = new Set(["starting", "standby", "spare", "gone"]); // spares cost nothing, nor does the start
const ORDER = ["computing", "slow", "loading", "reducing", "waiting", "checkpointing", "recovering", "joining", "paused", "script", "down", "dead"];

const LOST = new Set(["recovering", "checkpointing", "joining", "paused", "down", "dead"]);

function sharesOf(seconds) {
  const shares = Object.entries(seconds ?? {}).filter(([name, value]) => value > 0 && !NOT_LOST.has(name));
  return shares.sort(([one], [two]) => ORDER.indexOf(one) - ORDER.indexOf(two));
}

export function showTime(story) {
  const { header, accounts } = story;
  const shares = sharesOf(accounts?.run ?? header?.seconds);
  const sum = shares.reduce((all, [, value]) => all + value, 0);
  byId("time").hidden = !(sum > 0);
  if (!(sum > 0)) return;
  put("time-note", `${duration(sum)} of all workers together${accounts ? "" : ", since the first view"}`);
  fillBar(byId("shares"), shares, sum);
  byId("shares").setAttribute("aria-label", shares.map(([name, value]) => `${WORDS[name] ?? name} ${percent(value / sum)}`).join(", "));
  const values = byId("share-values");
  const wanted = shares.map(([name, value]) => [name, `${WORDS[name] ?? name} `, percent(value / sum, 1)]);
  if (values.children.length !== wanted.length) {
    values.replaceChildren(...wanted.map(([name]) => {
      const key = make("i", { class: `key c-${name}` });
      key.style.height = "10px";
      return make("li", {}, key, make("span"), make("b"));
    }));
  }
  wanted.forEach(([name, label, value], index) => {
    const [key, text, figure] = values.children[index].children;
    key.className = `key c-${name}`;
    put(text, label);
    put(figure, value);
  });
  if (byId("share-details").open) showRows(story);
}

function fillBar(bar, shares, sum) {
  while (bar.children.length > shares.length) bar.lastChild.remove();
  shares.forEach(([name, value], index) => {
    const part = bar.children[index] ?? bar.appendChild(make("div"));
    part.className = `c-${name}`;
    part.style.flexGrow = String(value / sum);
    part.style.flexBasis = "0";
    part.title = `${WORDS[name] ?? name}: ${percent(value / sum)}`;
  });
}

function showRows(story) {
  const rows = [];
  const now = story.header.now;
  for (const lane of story.lanes.filter((one) => one.group === "workers")) {
    const shares = sharesOf(story.accounts ? story.accounts.slots[lane.name] : secondsOf(lane, now));
    const sum = shares.reduce((all, [, value]) => all + value, 0);
    if (!sum) continue;
    const bar = make("div", { class: "shares" });
    fillBar(bar, shares, sum);
    const lost = shares.filter(([name]) => LOST.has(name)).reduce((all, [, value]) => all + value, 0);
    rows.push(make("span", {}, lane.name), bar, make("span", { class: "number" }, percent(1 - lost / sum)));
  }
  byId("share-rows").replaceChildren(...rows);
}

function secondsOf(lane, now) {
  return Object.fromEntries(Object.entries(lane.seconds).map(([name, value]) => [name, value + (name === lane.state ? Math.max(0, now - Math.max(lane.stretches.at(-1)[0], lane.counted_from)) : 0)]));
}

// -- tables ------------------------------------------------------------------------------------------------

function rowsOf(table, wanted, keyOf, build, fill) {
  const body = byId(table).tBodies[0];
  const present = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  wanted.forEach((item, index) => {
    const key = keyOf(item);
    let row = present.get(key);
    if (row) present.delete(key);
    else {
      row = build(item);
      row.dataset.key = key;
    }
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] ?? null);
    fill(row, item);
  });
  for (const row of present.values()) row.remove();
}

export function showCrew(story, drain) {
  const { header } = story;
  put("view", header?.view ? `view ${header.view}${header.view_reason ? `: ${header.view_reason}` : ""}` : "");
  byId("crew-empty").hidden = story.crew.length > 0;
  byId("crew").hidden = !story.crew.length;
  rowsOf("crew", story.crew, (one) => one.lane, () => {
    const row = make("tr");
    for (const kind of ["", "", "", "text less", "number least", "number less", "number", "for-actions"]) row.append(make("td", { class: kind }));
    row.cells[1].append(make("span", { class: "badge" }, make("i"), make("span")));
    return row;
  }, (row, one) => {
    const fact = story.facts[one.worker] ?? {};
    const alive = !["dead", "gone"].includes(one.state);
    row.className = alive ? "" : "faded";
    const [name, state, level, doing, shards, speed, memory, action] = row.cells;
    put(name, one.worker || one.lane);
    name.title = fact.pid ? `process ${fact.pid}` : "";
    const badge = state.firstChild;
    badge.firstChild.className = `c-${one.state}`;
    put(badge.lastChild, one.state === "gone" ? "ended" : one.state);
    put(level, alive ? fact.level ?? "–" : "");
    level.className = alive ? LEVELS[fact.level] ?? "" : "";
    level.title = fact.reason ?? (fact.phi !== undefined ? `phi ${fact.phi}` : "");
    put(doing, alive ? fact.activity ?? "" : "");
    put(shards, one.rank === null || one.rank === undefined ? "" : one.shards === null ? "even" : String(one.shards));
    shards.title = one.shards === null ? "shards are spread evenly" : "";
    const out = one.left_out;
    if (out && out.shards) {
      put(shards, `${Math.round((100 * out.left_out) / out.shards)} % left out`);
      shards.title = `the robust rule left out ${out.left_out} of ${out.shards} shards; suspicion ${out.suspicion} of 1`;
    }
    shards.classList.toggle("level-warn", Boolean(out && out.suspicion >= 0.5));
    put(speed, one.slow ? `${one.slow.toFixed(1)}× slower` : one.pace_s ? `${duration(one.pace_s)}/shard` : "");
    speed.classList.toggle("level-warn", Boolean(one.slow));
    put(memory, fact.rss ? bytes(fact.rss) : "");
    if (drain && alive && fact.pid) {
      if (!action.firstChild) action.append(make("button", { type: "button" }, "drain"));
      action.firstChild.onclick = () => drain(one.worker);
      action.firstChild.setAttribute("aria-label", `drain ${one.worker}`);
    } else action.replaceChildren();
  });
}

export function showServers(story) {
  const { header, servers, slices } = story;
  byId("serving").hidden = !servers.length && !slices.length;
  put("serving-note", [`${whole.format(header?.servers ?? 0)} alive here`, count(header?.failovers ?? 0, "failover")].join(" · "));
  rowsOf("servers", servers, (one) => one.server.replace(/\.\d+/, ""), () => {
    const row = make("tr");
    for (const kind of ["", "", "number", "number less", "number", "number"]) row.append(make("td", { class: kind }));
    row.cells[1].append(make("span", { class: "badge" }, make("i"), make("span")));
    return row;
  }, (row, one) => {
    const alive = !["dead", "gone"].includes(one.state);
    row.className = alive ? "" : "faded";
    const [name, state, leads, log, updates, lag] = row.cells;
    put(name, one.server);
    name.title = one.pid ? `process ${one.pid}` : "";
    state.firstChild.firstChild.className = `c-${one.state}`;
    put(state.firstChild.lastChild, one.state === "gone" ? "ended" : one.state);
    put(leads, alive ? `${one.leads} of ${one.slices}` : "");
    put(log, alive ? `${whole.format(one.entries)} · ${bytes(one.log_bytes)}` : "");
    log.title = "entries of its logs, and the bytes that are held for them";
    put(updates, whole.format(one.updates));
    put(lag, alive && one.lag_s !== null ? `${number(one.lag_s * 1000)} ms` : "");
    lag.classList.toggle("level-warn", Boolean(one.slow));
    lag.title = one.slow ? `${one.slow} times as long as the others` : "how long it takes to confirm what the others send";
  });
  rowsOf("slices", slices, (one) => one.slice, () => {
    const row = make("tr");
    for (const kind of ["", "", "less", "number"]) row.append(make("td", { class: kind }));
    return row;
  }, (row, one) => {
    const [name, primary, others, epoch] = row.cells;
    put(name, one.slice);
    put(primary, one.primary);
    put(others, one.others.join(", ") || "no other");
    put(epoch, whole.format(one.epoch));
    epoch.title = count(one.failovers, "failover");
  });
}

export function showCheckpoints(story) {
  const list = [...story.checkpoints].reverse();
  byId("saves-empty").hidden = list.length > 0;
  byId("saves").hidden = !list.length;
  const uri = list[0]?.uri ?? "";
  put("saves-note", uri.length > 44 ? `…${uri.slice(-43)}` : uri);
  byId("saves-note").title = uri;
  const stored = story.stored && new Set(story.stored);
  const newest = Math.max(...(story.stored ?? []), -1); // what is newer came after the last look
  rowsOf("saves", list, (one) => `${one.step}@${one.t}`, () => {
    const row = make("tr");
    for (const kind of ["number", "", "number", "number less", ""]) row.append(make("td", { class: kind }));
    return row;
  }, (row, one) => {
    const [step, when, size, took, state] = row.cells;
    const known = stored && one.uri === uri && one.step <= newest;
    const kept = !known || stored.has(one.step);
    row.className = kept ? "" : "faded";
    put(step, whole.format(one.step));
    put(when, clock(one.t));
    when.title = `${moment(one.t)}, by ${one.who}`;
    put(size, bytes(one.bytes));
    put(took, duration(one.duration_s));
    took.title = `training was held up for ${duration(one.held_s)}`;
    put(state, known ? (kept ? "in storage" : "superseded") : "committed");
  });
}
