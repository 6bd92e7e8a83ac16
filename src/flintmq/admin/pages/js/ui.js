// The parts that pages are made of: numbers with a past, charts, tables, dialogs.
import {
  html, useState, useEffect, useRef, useMemo, useScope, useStore, useApi, A, Ago, ApiError, address, api, bytes,
  count, duration, exact, many, notify, rate, restarts, setQuery, time,
} from "./lib.js";

export { Chart } from "./chart.js";

// --- States

const LEVELS = ["ok", "minor", "warning", "critical"];
const WORDS = ["fine", "notice", "warning", "critical"];
const SIGNS = ["●", "◆", "▲", "■"];

export function Level({ level, words = true }) {
  return html`<span class=${`level ${LEVELS[level]}`}><span aria-hidden="true">${SIGNS[level]}</span>${words ? ` ${WORDS[level]}` : html`<span class="sr"> ${WORDS[level]}</span>`}</span>`;
}

export const Label = ({ kind = "", children, title }) => html`<span class=${`label ${kind}`} title=${title}>${children}</span>`;

export function Failure({ error, retry }) {
  if (!error) return null;
  return html`<div class="failure" role="alert"><strong>${error instanceof ApiError ? error.words : String(error)}</strong>
    ${error.status === 403 && error.answer?.missing_role ? html`<p>This needs the role <b>${error.answer.missing_role}</b>.</p>` : null}
    ${error.status === 401 ? html`<p><${A} to="/login">Log in</${A}> to see this.</p>` : null}
    ${retry ? html`<button onClick=${retry}>Try again</button>` : null}</div>`;
}

export function Missing({ nodes }) {
  if (!nodes?.length) return null;
  return html`<p class="missing" role="status">▲ Not in these numbers: ${nodes.join(", ")} ${nodes.length === 1 ? "does" : "do"} not answer.</p>`;
}

export const Loading = () => html`<div class="loading" aria-busy="true"><span class="sr">Loading …</span><i></i><i></i><i></i></div>`;

export function Empty({ title, children }) {
  return html`<div class="empty"><h3>${title}</h3>${children}</div>`;
}

export function Copy({ text, label = "Copy" }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    try { await navigator.clipboard.writeText(text); } catch { /* no clipboard without https */
      const area = document.createElement("textarea");
      area.value = text; document.body.append(area); area.select(); document.execCommand("copy"); area.remove();
    }
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<button class="small" onClick=${copy} aria-live="polite">${done ? "Copied" : label}</button>`;
}

export const Command = ({ children }) => html`<div class="command"><code>${children}</code><${Copy} text=${children} /></div>`;

/** The command that publishes a first message, to a node that is up. */
export function FirstPublish({ topic }) {
  const nodes = Object.entries(useScope("cluster")?.nodes || {});
  const [node] = nodes.find(([, one]) => one.up) || ["127.0.0.1:4151"];
  return html`<${Command}>${`curl -d 'hello' 'http://${node}/pub?topic=${encodeURIComponent(topic)}'`}</${Command}>`;
}

export function Crumbs({ items }) {
  return html`<nav class="crumbs" aria-label="Breadcrumbs">${items.map(([name, to], index) =>
    html`<span key=${index}>${to ? html`<${A} to=${to}>${name}</${A}>` : html`<b aria-current="page">${name}</b>`}</span>`)}</nav>`;
}

/** In place of a page whose thing cannot be shown. */
export const Unknown = ({ crumbs, name, error, retry }) => html`<div class="head"><${Crumbs} items=${crumbs} /><h1>${name}</h1></div><${Failure} error=${error} retry=${retry} />`;

export function useTitle(title) {
  useEffect(() => { document.title = title ? `${title} – flintmq` : "flintmq"; }, [title]);
}

// --- Numbers

export function Sparkline({ values, colour = "accent", label, width = 96, height = 24 }) {
  const path = useMemo(() => {
    const known = (values || []).filter((value) => value !== null);
    if (known.length < 2) return null;
    const top = Math.max(...known, 1e-9);
    const step = width / Math.max(values.length - 1, 1);
    let line = "";
    let pen = false;
    values.forEach((value, index) => {
      if (value === null) { pen = false; return; }
      const x = (index * step).toFixed(1);
      const y = (height - 2 - (value / top) * (height - 4)).toFixed(1);
      line += `${pen ? "L" : "M"}${x} ${y}`;
      pen = true;
    });
    return line;
  }, [values]);
  return html`<svg class=${`spark ${colour}`} viewBox=${`0 0 ${width} ${height}`} width=${width} height=${height} role="img" aria-label=${label || "last hour"}>
    ${path ? html`<path d=${path} />` : null}</svg>`;
}

export function Stat({ title, value, values, colour, hint, note, to, query }) {
  const body = html`<span class="stat-title">${title}</span><span class="stat-value">${value}</span>${note ? html`<span class="stat-note">${note}</span>` : null}
    ${values ? html`<${Sparkline} values=${values} colour=${colour} label=${`${title}, last hour`} width=${120} />` : null}`;
  return to ? html`<${A} class="stat" to=${to} query=${query} title=${hint}>${body}</${A}>` : html`<div class="stat" title=${hint}>${body}</div>`;
}

// --- Charts

const SECONDS = { "15m": 900, "1h": 3600, "6h": 21600, "24h": 86400 };

/** The past of one thing from the daemon, then each sample of the stream appended: { x, series… }. */
export function useHistory(kind, name, range, now) {
  const restarted = useStore(restarts);
  const [data, setData] = useState({ x: [] });
  useEffect(() => {
    let left = false;
    setData({ x: [] });
    api("/history", { query: { kind, name, range, points: 600 } }).then((answer) => {
      if (left) return;
      const length = Math.max(0, ...Object.values(answer.series).map((values) => values.length));
      const x = Array.from({ length }, (_, index) => answer.from / 1000 + index * answer.step);
      setData({ x, step: answer.step, ...answer.series });
    }).catch(() => { /* the page itself shows that the daemon does not answer */ });
    return () => { left = true; };
  }, [kind, name, range, restarted]);
  useEffect(() => {
    if (!now || !now.at) return;
    setData((old) => {
      const at = now.at / 1000;
      const keys = Object.keys(old).filter((key) => key !== "x" && key !== "step");
      if (!keys.length) return old;
      const replace = old.x.length > 0 && at - old.x[old.x.length - 1] < (old.step || 2) * 0.9;
      if (old.x.length && at <= old.x[old.x.length - 1]) return old;
      const from = at - SECONDS[range];
      const first = old.x.findIndex((time) => time >= from);
      const cut = (values, value) => [...(first > 0 ? values.slice(first) : values).slice(0, replace ? -1 : undefined), value];
      const next = { step: old.step, x: cut(old.x, replace ? old.x[old.x.length - 1] : at) };
      for (const key of keys) next[key] = cut(old[key].length ? old[key] : old.x.map(() => null), now[key] ?? null);
      return next;
    });
  }, [now?.at]);
  return data;
}

export function useRange() {
  const { query } = useStore(address);
  return SECONDS[query.range] ? query.range : "1h";
}

/** `most`: the longest range that the daemon keeps for it. */
export function Ranges({ most = "24h" }) {
  const range = useRange();
  return html`<div class="ranges" role="group" aria-label="Time range">${Object.keys(SECONDS).filter((name) => SECONDS[name] <= SECONDS[most]).map((name) =>
    html`<button key=${name} class="small" aria-pressed=${name === range} onClick=${() => setQuery({ range: name === "1h" ? "" : name })}>${name}</button>`)}</div>`;
}

// --- Tables

/** Columns of numbers, each the field of its name. */
const numbers = (format) => (key, title, more) => ({ key, title, num: true, render: (row) => format(row[key]), ...more });
export const counted = numbers(count);
export const rated = numbers(rate);
export const sized = numbers(bytes);

/** columns: [{ key, title, num, sort (a field of the server, or null), render(row), main, card }] */
export function Table({ columns, rows, name, sort, onSort, selected, onSelect, label, empty }) {
  const all = selected && rows.length > 0 && rows.every((row) => selected.has(name(row)));
  const toggle = (row) => {
    const next = new Set(selected);
    if (!next.delete(name(row))) next.add(name(row));
    onSelect(next);
  };
  const toggleAll = () => onSelect(all ? new Set() : new Set(rows.map(name)));
  if (!rows.length && empty) return empty;
  return html`<div class="table-box"><table aria-label=${label}>
    <thead><tr>
      ${selected ? html`<th class="pick"><input type="checkbox" checked=${all} onChange=${toggleAll} aria-label="Select all on this page" /></th>` : null}
      ${columns.map((column) => {
        const field = column.sort === undefined ? column.key : column.sort;
        const direction = sort === field ? "ascending" : sort === `-${field}` ? "descending" : undefined;
        const next = direction === "descending" ? field : direction === "ascending" ? "" : column.num ? `-${field}` : field;
        return html`<th key=${column.key} class=${column.num ? "num" : ""} aria-sort=${direction} scope="col" title=${column.hint}>
          ${onSort && field ? html`<button class="sort" onClick=${() => onSort(next)}>${column.title}<span aria-hidden="true">${direction === "ascending" ? " ↑" : direction ? " ↓" : ""}</span></button>` : column.title}</th>`;
      })}</tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${name(row)} class=${row.up === false ? "stale" : ""}>
      ${selected ? html`<td class="pick"><input type="checkbox" checked=${selected.has(name(row))} onChange=${() => toggle(row)} aria-label=${`Select ${name(row)}`} /></td>` : null}
      ${columns.map((column) => html`<td key=${column.key} data-title=${column.title} class=${`${column.num ? "num" : ""} ${column.main ? "main" : ""} ${column.card === false ? "no-card" : ""} ${column.wrap ? "wrap" : ""}`}>${column.render ? column.render(row) : row[column.key]}</td>`)}
    </tr>`)}</tbody></table></div>`;
}

export function Filter({ value, onInput, placeholder = "Filter", label = "Filter" }) {
  const [text, setText] = useState(value || "");
  const timer = useRef(0);
  useEffect(() => { if (!timer.current) setText(value || ""); }, [value]);
  const change = (event) => {
    const given = event.target.value;
    setText(given);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => { timer.current = 0; onInput(given); }, 250);
  };
  return html`<input class="filter" type="search" value=${text} onInput=${change} placeholder=${placeholder} aria-label=${label} />`;
}

/** A list of the daemon, filtered, sorted and cut on the server; its state is in the address. */
export function List({ path, query = {}, columns, name, label, empty, prefix = "", every = 2000, limit = 100, selectable, actions, sparks, fresh }) {
  const { query: state } = useStore(address);
  const field = (key) => prefix + key;
  const sort = state[field("sort")] || "";
  const filter = state[field("filter")] || "";
  const offset = Math.max(0, Number.parseInt(state[field("offset")] || "0", 10) || 0);
  const { data, error, loading, reload } = useApi(path, { ...query, sort, filter, offset, limit }, { every });
  const [selected, setSelected] = useState(new Set());
  const items = data?.items || [];
  useEffect(() => { if (fresh) reload(); }, [fresh]);
  const drawn = useSparklines(sparks, items, name);
  if (error && !data) return html`<${Failure} error=${error} retry=${reload} />`;
  if (!data) return html`<${Loading} />`;
  const last = Math.min(offset + items.length, data.matched);
  const page = (to) => setQuery({ [field("offset")]: to || "" });
  return html`<section class="list" aria-label=${label}>
    <div class="list-head">
      <${Filter} value=${filter} label=${`Filter ${label}`} placeholder=${data.total ? `Filter ${many(data.total, label)}` : "Filter"} onInput=${(text) => setQuery({ [field("filter")]: text, [field("offset")]: "" })} />
      <span class="list-count" role="status">${filter ? `${exact(data.matched)} of ${many(data.total, label)}` : many(data.total, label)}</span>
      ${actions && selected.size ? html`<span class="bulk">${actions([...selected], () => { setSelected(new Set()); reload(); })}</span>` : null}
      ${actions && !selected.size && filter && data.matched ? html`<span class="bulk">${actions(null, reload, { filter, matched: data.matched })}</span>` : null}
    </div>
    <${Missing} nodes=${data.missing} />
    ${error ? html`<${Failure} error=${error} />` : null}
    <${Table} label=${label} columns=${columns(drawn)} rows=${items} name=${name} sort=${sort} selected=${selectable ? selected : null} onSelect=${setSelected}
      onSort=${(next) => setQuery({ [field("sort")]: next, [field("offset")]: "" })}
      empty=${filter ? html`<${Empty} title=${`Nothing matches “${filter}”`}><button onClick=${() => setQuery({ [field("filter")]: "" })}>Clear the filter</button></${Empty}>` : empty} />
    ${data.matched > limit ? html`<div class="pager">
      <button class="small" disabled=${!offset} onClick=${() => page(Math.max(0, offset - limit))}>← Previous</button>
      <span>${exact(offset + 1)}–${exact(last)} of ${exact(data.matched)}</span>
      <button class="small" disabled=${last >= data.matched} onClick=${() => page(offset + limit)}>Next →</button></div>` : null}
  </section>`;
}

export function useSparklines(sparks, items, name) {
  const [drawn, setDrawn] = useState({});
  const names = sparks ? items.map(name).join(",") : "";
  useEffect(() => {
    if (!names) return undefined;
    let left = false;
    const load = () => {
      if (document.hidden) return;
      const parts = items.map(name).slice(0, 200);
      api("/sparklines", { query: { kind: sparks.kind, names: parts.join(","), series: sparks.series.join(","), points: 30, range: "1h" } })
        .then((answer) => { if (!left) setDrawn(answer.items); }).catch(() => {});
    };
    load();
    const timer = setInterval(load, 20000);
    return () => { left = true; clearInterval(timer); };
  }, [names]);
  return drawn;
}

// --- Dialogs

export function Dialog({ title, onClose, children, wide }) {
  const box = useRef(null);
  useEffect(() => {
    const opener = document.activeElement;
    box.current.showModal();
    return () => opener?.focus?.();
  }, []);
  return html`<dialog ref=${box} class=${wide ? "wide" : ""} aria-label=${title} onClose=${onClose}
    onClick=${(event) => { if (event.target === box.current) box.current.close(); }}>
    <div class="dialog"><header><h2>${title}</h2><button class="icon" aria-label="Close" onClick=${() => box.current.close()}>✕</button></header>${children}</div></dialog>`;
}

const VERBS = {
  create_topic: "Create", create_channel: "Create", pause_topic: "Pause", unpause_topic: "Resume", pause_channel: "Pause", unpause_channel: "Resume",
  empty_topic: "Empty", empty_channel: "Empty", delete_topic: "Delete", delete_channel: "Delete", tombstone_topic_producer: "Tombstone", drain_node: "Drain",
};
const DONE = { Create: "Created", Pause: "Paused", Resume: "Resumed", Empty: "Emptied", Delete: "Deleted", Tombstone: "Tombstoned", Drain: "Draining" };
const DANGEROUS = /^(empty|delete|tombstone|drain)/;

function words(target, preview) {
  const parts = [preview.in_flight && `${exact(preview.in_flight)} in flight`, preview.deferred && `${exact(preview.deferred)} deferred`].filter(Boolean);
  const lost = preview.messages ? html`<b>${many(preview.messages, "messages")}</b>${parts.length ? ` (${parts.join(", ")})` : ""} will be lost. ` : null;
  const clients = preview.clients ? `${many(preview.clients, "clients")} will be disconnected.` : "No client is connected.";
  switch (target.action) {
    case "pause_topic": return html`Messages are kept in the topic and reach no channel until it is resumed.`;
    case "pause_channel": return html`Consumers get no more messages until the channel is resumed. ${preview.clients ? `${many(preview.clients, "consumers")} connected.` : "No consumer is connected."}`;
    case "unpause_topic": case "unpause_channel": return html`Delivery goes on. ${preview.messages ? `${many(preview.messages, "messages")} waiting.` : "No message waits."}`;
    case "empty_topic": case "empty_channel": return lost || html`It is empty already.`;
    case "delete_topic": return html`${lost || "It has no messages. "}${preview.channels ? `${many(preview.channels, "channels")} will be deleted too. ` : ""}${clients}`;
    case "delete_channel": return html`${lost || "It has no messages. "}${clients}`;
    case "tombstone_topic_producer": return html`${lost}Consumers stop using <b>${target.node}</b> for this topic, which is then deleted there.`;
    case "drain_node": return html`<b>${target.node}</b> refuses new messages, hands out what it has, and stops when it is empty. ${preview.messages ? `${many(preview.messages, "messages")} waiting there.` : "No message waits there."}`;
    default: return null;
  }
}

/** Pausing and resuming take each other back. */
function undoOf(target, onDone) {
  const [, verb, thing] = /^(pause|unpause)_(.+)$/.exec(target.action) || [];
  if (!verb) return null;
  const action = `${verb === "pause" ? "unpause" : "pause"}_${thing}`;
  return () => api("/actions", { method: "POST", body: { ...target, action } }).then(() => onDone?.(), (error) => notify(error.words, "error"));
}

/** Asks, with what will be hit counted when the dialog opens, and acts. */
export function ActionDialog({ target, onClose, onDone }) {
  const { data: preview, error, reload } = useApi("/preview", target);
  const [typed, setTyped] = useState("");
  const [busy, setBusy] = useState(false);
  const [failure, setFailure] = useState(null);
  const verb = VERBS[target.action];
  const thing = target.channel ? `channel ${target.topic}/${target.channel}` : target.node && target.action === "drain_node" ? `node ${target.node}` : `topic ${target.topic}`;
  const act = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      const answer = await api("/actions", { method: "POST", body: { ...target, confirm: preview.confirm ? typed : undefined } });
      const bad = (answer.results || []).filter((result) => result.error);
      if (bad.length) notify(`${verb} ${thing}: ${bad.map((result) => `${result.target}: ${result.error}`).join("; ")}`, "error");
      else notify(answer.message || `${DONE[verb]} ${thing} on ${many(preview.nodes.length, "nodes")}.`, answer.message ? "error" : "info", answer.message ? null : undoOf(target, onDone));
      onClose();
      onDone?.();
    } catch (problem) { setFailure(problem); } finally { setBusy(false); }
  };
  return html`<${Dialog} title=${`${verb} ${thing}?`} onClose=${onClose}>
    <form onSubmit=${act}>
      ${error ? html`<${Failure} error=${error} retry=${reload} />` : !preview ? html`<${Loading} />` : html`
        <p>${words(target, preview)}</p><p class="quiet">On ${preview.nodes.join(", ") || "no node"}.</p><${Missing} nodes=${preview.missing} />
        ${preview.confirm ? html`<label>Type <b>${preview.confirm}</b> to confirm<input name="confirm" autocomplete="off" value=${typed} onInput=${(event) => setTyped(event.target.value)} /></label>` : null}`}
      <${Failure} error=${failure} />
      <footer><button class=${DANGEROUS.test(target.action) ? "danger" : "primary"} disabled=${!preview || busy || (preview.confirm && typed !== preview.confirm)}>${verb}</button>
        <span class="grow"></span><button type="button" onClick=${onClose}>Cancel</button></footer>
    </form></${Dialog}>`;
}

/** Buttons for a topic or channel, with their dialog. */
export function Actions({ items, onDone, small }) {
  const [target, setTarget] = useState(null);
  return html`<span class="actions">${items.filter(Boolean).map((item) => html`<button key=${item.action} class=${`${DANGEROUS.test(item.action) ? "danger-quiet" : ""} ${small ? "small" : ""}`} onClick=${() => setTarget(item)}>${item.label || `${VERBS[item.action]} …`}</button>`)}
    ${target ? html`<${ActionDialog} target=${strip(target)} onClose=${() => setTarget(null)} onDone=${() => onDone?.(target)} />` : null}</span>`;
}

const strip = ({ action, topic, channel, node }) => ({ action, topic, channel, node });

export function Tabs({ items, current, label }) {
  const box = useRef(null);
  // On a narrow screen the current one may lie beyond the edge.
  useEffect(() => {
    const tab = box.current.querySelector("[aria-current]");
    if (tab) box.current.scrollLeft = tab.offsetLeft + tab.offsetWidth - box.current.clientWidth;
  }, [current]);
  return html`<nav class="tabs" aria-label=${label} ref=${box}>${items.map(([name, title, to, query]) =>
    html`<${A} key=${name} to=${to} query=${query} aria-current=${name === current ? "page" : undefined}>${title}</${A}>`)}</nav>`;
}

export function Quantiles({ e2e }) {
  if (!e2e?.quantiles?.length) return null;
  return html`<section aria-label="Latency"><h2>From publish to finish</h2><div class="stats">${e2e.quantiles.map((one) =>
    html`<${Stat} key=${one.quantile} title=${`p${+(one.quantile * 100).toFixed(2)}`} value=${duration(one.average / 1000)} hint=${`nodes: ${duration(one.min / 1000)} to ${duration(one.max / 1000)}`} />`)}</div></section>`;
}

const MOST_PROBLEMS = 200;

export function Problems({ problems, limit = 20 }) {
  const [all, setAll] = useState(false);
  if (!problems) return null;
  if (!problems.length) return html`<p class="all-well"><${Level} level=${0} words=${false} /> Nothing needs attention.</p>`;
  return html`<ul class="problems">${problems.slice(0, all ? MOST_PROBLEMS : limit).map((problem) => {
    const thing = problem.channel ? `${problem.topic}/${problem.channel}` : problem.topic || problem.node || problem.reader || "cluster";
    return html`<li key=${problem.kind + thing} class=${LEVELS[problem.level]}><${A} to=${problem.link}><${Level} level=${problem.level} words=${false} /><b>${thing}</b><span>${problem.text}</span>${problem.since ? html`<${Ago} at=${problem.since} />` : null}</${A}></li>`;
  })}${problems.length > limit ? html`<li><button class="more" aria-expanded=${all} onClick=${() => setAll(!all)}>${all ? "Show fewer" : `Show ${exact(Math.min(problems.length, MOST_PROBLEMS) - limit)} more`}</button></li>` : null}</ul>`;
}

