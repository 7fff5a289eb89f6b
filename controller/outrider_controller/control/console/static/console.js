"use strict";
// Shows what /console/data answers, once a second. Text only ever becomes text: nothing here is read as HTML.

const EVERY_MS = 1000;
let before = null;
let shownRequest = "";
// An operator's, from the address, where it does not stay.
const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  sessionStorage.setItem("token", given);
  history.replaceState(null, "", location.pathname + location.search);
}
const token = sessionStorage.getItem("token");
// Asked for again until its trace says that it has ended.
let unfinished = false;

const byId = (id) => document.getElementById(id);
const number = (value) => Number(value ?? 0);
const share = (part, whole) => (whole > 0 ? (part / whole).toFixed(2) : "–");
const seconds = (microseconds) => `${(number(microseconds) / 1e6).toFixed(1)} s`;

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// columns: [heading, value of a row or a node for it, whether it is a number]
function fill(table, columns, rows) {
  if (rows.length === 0) return table.replaceChildren();
  const head = element("tr");
  for (const [heading, , isNumber] of columns) head.append(element("th", heading, isNumber && "number"));
  const lines = rows.map((row) => {
    const line = element("tr");
    for (const [heading, of, isNumber] of columns) {
      const value = of(row);
      const cell = element("td", undefined, isNumber && "number");
      // Where a screen is narrow, each cell stands on a line with its heading.
      cell.dataset.heading = heading;
      cell.append(value instanceof Node ? value : String(value ?? ""));
      line.append(cell);
    }
    return line;
  });
  const body = element("tbody");
  body.append(...lines);
  const top = element("thead");
  top.append(head);
  table.replaceChildren(top, body);
}

// Of sums that only grow, asked for twice.
function rates(data) {
  const perSecond = new Map();
  const elapsed = before ? (data.now_ms - before.now_ms) / 1000 : 0;
  for (const one of data.activities) {
    const name = one.tenant || one.worker_id;
    const was = before?.activities.find((other) => (other.tenant || other.worker_id) === name);
    const grown = was ? number(one.output_tokens) - number(was.output_tokens) : 0;
    perSecond.set(name, elapsed > 0 && grown >= 0 ? grown / elapsed : 0);
  }
  return perSecond;
}

function tenantRows(data, perSecond) {
  return data.activities.filter((one) => one.tenant).flatMap((one) => {
    const decisions = data.decisions[one.tenant] ?? [];
    return (decisions.length ? decisions : [null]).map((decision, at) => ({
      name: one.tenant, activity: one, decision, rate: perSecond.get(one.tenant), first: at === 0,
    }));
  });
}

function badge(decision) {
  if (!decision) return "–";
  return element("span", decision.mode, `mode ${decision.mode}`);
}

function why(decision) {
  if (!decision) return "";
  const speed = decision.times_plain === null ? decision.speed : `${decision.speed} × plain`;
  return element("span", `${decision.why}. Speed: ${speed}`, "why");
}

function saving(seen, prefix = "") {
  if (seen?.[`${prefix}saving`] === undefined) return "–";
  const [saved, lower, upper] = ["saving", "lower", "upper"].map((name) => number(seen[prefix + name]).toFixed(3));
  return `${saved} (${lower} to ${upper})`;
}

function requestLink(sequence) {
  const link = element("button", sequence.request_id, "link");
  link.addEventListener("click", () => {
    byId("request_id").value = sequence.request_id;
    showRequest(sequence.request_id);
  });
  return link;
}

function draw(data) {
  const perSecond = rates(data);
  const running = data.workers.filter((worker) => worker.role === "router").length;
  const tokens = data.activities.filter((one) => one.tenant).reduce((sum, one) => sum + perSecond.get(one.tenant), 0);
  byId("summary").textContent =
    `${data.workers.length} processes, ${running} of them routers; ${data.num_sequences} ${data.num_sequences === 1 ? "request" : "requests"} under way; ${tokens.toFixed(0)} tokens/s`;
  byId("trouble").textContent = [
    data.metadata_available ? "" : "The metadata store is away: this is the last known list.",
    data.unreachable_routers.length ? `No answer from ${data.unreachable_routers.join(", ")}.` : "",
  ].join(" ").trim();
  fill(byId("tenants"), [
    ["tenant", (row) => (row.first ? row.name : "")],
    ["speculation", (row) => badge(row.decision)],
    ["target", (row) => row.decision?.target],
    ["drafts of", (row) => (row.decision ? { draft: "draft workers", target: "the target" }[row.decision.made_by] : "")],
    ["running", (row) => (row.first ? number(row.activity.num_running) : ""), true],
    ["tokens/s", (row) => (row.first ? row.rate.toFixed(0) : ""), true],
    ["acceptance", (row) => (row.first ? share(number(row.activity.num_accepted_draft_tokens), number(row.activity.num_verified_tokens)) : ""), true],
    ["row price", (row) => (row.decision?.price ? row.decision.price.toFixed(2) : "–"), true],
    ["why", (row) => why(row.decision)],
  ], tenantRows(data, perSecond));
  fill(byId("workers"), [
    ["id", (row) => row.id],
    ["role", (row) => row.role],
    ["status", (row) => row.status],
    ["model", (row) => row.model],
    ["running", (row) => row.running, true],
    ["waiting", (row) => row.waiting, true],
    ["free blocks", (row) => row.free_blocks, true],
    ["tokens/s", (row) => (perSecond.has(row.id) ? perSecond.get(row.id).toFixed(0) : ""), true],
    ["address", (row) => row.address],
  ], data.workers);
  fill(byId("rollouts"), [
    ["draft", (row) => row.draft],
    ["tenant", (row) => row.tenant || "all"],
    ["state", (row) => String(row.state).replace("ROLLOUT_STATE_", "").toLowerCase().replace("_", " ")],
    ["share", (row) => number(row.share).toFixed(2), true],
    ["tokens", (row) => number(row.evidence?.candidate?.tokens).toFixed(0), true],
    ["saving a token", (row) => saving(row.evidence), true],
    ["why", (row) => element("span", row.reason, "why")],
  ], data.rollouts);
  fill(byId("sequences"), [
    ["request", requestLink],
    ["tenant", (row) => row.tenant],
    ["target", (row) => row.target_id],
    ["draft", (row) => row.draft_id],
    ["tokens", (row) => number(row.output_tokens), true],
    ["acceptance", (row) => share(number(row.num_accepted_draft_tokens), number(row.num_verified_tokens)), true],
    ["lasts", (row) => seconds(row.duration_us), true],
  ], data.sequences);
  fill(byId("events"), [
    ["time", (row) => new Date(number(row.unix_ms)).toLocaleTimeString()],
    ["event", (row) => row.kind.replaceAll("_", " ")],
    ["", (row) => Object.entries(row.fields ?? {}).map(([name, value]) => `${name} ${value}`).join(", ")],
  ], [...data.events].reverse());
  before = data;
}

// Text and id of each. One that is no text of its own, as the first part of a character, is shown by its id.
function tokensOf(ids, texts) {
  return (ids ?? []).map((id, at) => [(texts?.[at] || String(id)).replaceAll("\n", "⏎"), id]);
}

// Tokens as they were recorded; how many where they were not.
function tokens(kept, count, className, sources = []) {
  if (kept.length === 0) return count > 0 ? [element("span", `${count} tokens`, `token ${className}`)] : [];
  return kept.map(([text, id], at) => {
    const shown = element("span", text, `token ${className}${colourOf(sources[at])}`);
    shown.title = `token ${id}${sources[at] ? `, ${sources[at]}` : ""}`;
    return shown;
  });
}

// Of a draft worker's model none: a second class, known to the style sheet.
function colourOf(source) {
  if (!source || source === "model") return "";
  return ["ngram", "prediction", "suffix"].includes(source) ? ` ${source}` : " others";
}

// The source of each accepted token, then of each rejected one.
function sourcesOf(round) {
  const names = (round.sources ?? []).map((one) => one.source ?? "");
  const count = number(round.num_accepted) + (round.rejected_token_ids ?? []).length;
  return (round.token_sources ?? Array(count).fill(0)).map((place) => names[place] ?? "");
}

function roundLine(round) {
  const accepted = number(round.num_accepted);
  const kept = tokensOf(round.token_ids, round.texts);
  const line = element("div", undefined, "round");
  line.append(element("span", `${seconds(round.at_us)}, ${number(round.num_drafted)} drafted`));
  const shown = element("span"), sources = sourcesOf(round);
  shown.append(
    ...tokens(kept.slice(0, accepted), accepted, "accepted", sources),
    ...tokens(kept.slice(accepted), number(round.num_tokens) - accepted, "own"),
    ...tokens(tokensOf(round.rejected_token_ids, round.rejected_texts), number(round.num_drafted) - accepted, "rejected"),
  );
  line.append(shown);
  return line;
}

function drawTrace(answer) {
  const lines = (answer.traces ?? []).flatMap((trace) => [
    element("p", `${trace.running ? "Running" : "Ended"} on ${trace.router_id}: tenant ${trace.tenant}, model ${trace.model}, ` +
      `${number(trace.output_tokens)} tokens in ${seconds(trace.duration_us)}.`),
    ...(trace.rounds ?? []).map(roundLine),
    ...(number(trace.num_rounds_omitted) ? [element("p", `${trace.num_rounds_omitted} rounds more were not recorded.`)] : []),
  ]);
  const box = byId("trace");
  // Whoever reads the last rounds sees those that come.
  const atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 4;
  box.replaceChildren(...(answer.error ? [element("p", answer.error)] : lines));
  if (atEnd) box.scrollTop = box.scrollHeight;
}

async function ask(path) {
  const response = await fetch(path, { headers: token ? { Authorization: `Bearer ${token}` } : {} });
  return response.json();
}

async function showRequest(id) {
  shownRequest = id;
  unfinished = Boolean(id);
  if (!id) return;
  const answer = await ask(`console/trace?${new URLSearchParams({ request_id: id })}`);
  // Another may have been asked for meanwhile.
  if (shownRequest !== id) return;
  unfinished = Boolean(answer.error) || answer.traces.some((trace) => trace.running || trace.texts_to_come);
  drawTrace(answer);
}

async function refresh() {
  try {
    const data = await ask("console/data");
    if (data.error) throw new Error(data.error);
    draw(data);
    if (unfinished) await showRequest(shownRequest);
  } catch (error) {
    byId("trouble").textContent = `No answer from the control plane: ${error.message}`;
  }
  setTimeout(refresh, EVERY_MS);
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  showRequest(byId("request_id").value.trim());
});
const wanted = new URLSearchParams(location.search).get("request_id");
if (wanted) {
  byId("request_id").value = wanted;
  showRequest(wanted);
}
refresh();
