// Look into a queue: a list of messages, the chosen one decoded beside it; filters, bulk actions, and a live tail.
import {
  html, useApi, useEffect, useMemo, useRef, useState, useStore, A, Ago, address, api, bytes, clock, count, exact, link, many, may, notify, session, setQuery,
} from "../lib.js";
import { Dialog, Empty, Failure, Filter, FirstPublish, Label, Loading, Missing, useTitle } from "../ui.js";
import { Body, firstLine, fromBase64 } from "../body.js";
import { TopicHead } from "./topics.js";
import { RedriveDialog } from "./dead.js";

const STATES = [["ready", "Ready"], ["in_flight", "In flight"], ["deferred", "Deferred"], ["dead", "Dead"], ["log", "Log"], ["tail", "Live"]];
const PAGE = 50;

export function Messages() {
  const { query } = useStore(address);
  const { topic, channel } = query;
  useTitle(topic ? `Messages of ${channel ? `${topic}/${channel}` : topic}` : "Messages");
  const path = channel ? `/topics/${encodeURIComponent(topic)}/${encodeURIComponent(channel)}` : `/topics/${encodeURIComponent(topic || "")}`;
  const { data, reload } = useApi(topic ? path : null, {}, { every: 5000 });
  if (!topic) return html`<${Empty} title="Whose messages?"><p>Open a <${A} to="/topics">topic</${A}> or one of its channels, then its messages.</p></${Empty}>`;
  const row = channel ? data?.channel : data?.topic;
  const offered = STATES.filter(([name]) => channel || name === "log" || name === "tail");
  const state = offered.some(([name]) => name === query.state) ? query.state : offered[0][0];
  const counts = { ready: row?.depth, in_flight: row?.in_flight, deferred: row?.deferred };
  return html`<${TopicHead} topic=${topic} channel=${channel} paused=${row?.paused} current="messages" onDone=${reload} />
    <nav class="states" aria-label="States of messages">${offered.map(([name, title]) => html`<${A} key=${name} to="/messages" query=${{ topic, channel, state: name }} aria-current=${name === state ? "page" : undefined}>${title}${counts[name] ? html` <span class="badge">${count(counts[name])}</span>` : null}</${A}>`)}</nav>
    ${!may("operate") ? html`<${NoRight} />` : state === "tail" ? html`<${Tail} key=${topic} topic=${topic} />` : html`<${Look} key=${`${topic}/${channel}/${state}`} topic=${topic} channel=${state === "log" ? "" : channel} state=${state} />`}`;
}

const NoRight = () => html`<${Empty} title="Bodies are not for everybody"><p>Messages are shown to users with the role <b>operate</b>.
  ${session.get()?.login === "none" ? " Start nsqadmin with --users-file to log in here, or with --insecure to show them to all." : ""}</p></${Empty}>`;

// --- The list: asked for in slices, so that a filter over many messages shows how far it is

function useMessages(wanted) {
  const key = JSON.stringify(wanted);
  const [state, setState] = useState({ messages: [], running: true, scanned: 0, total: null, next: null, error: null });
  const run = useRef(0);
  const fetchMore = async (after, have, scanned) => {
    const number = (run.current += 1);
    let messages = have;
    let next = after;
    setState((old) => ({ ...old, messages, running: true, error: null }));
    const target = have.length + PAGE;
    try {
      do {
        const answer = await api("/messages", { query: { ...wanted, limit: PAGE, after: next } });
        if (number !== run.current) return;
        messages = [...messages, ...answer.messages];
        scanned += answer.scanned || answer.messages.length;
        next = answer.next;
        setState({ messages, running: Boolean(next) && messages.length < target, scanned, total: answer.total, next, error: null, missing: answer.missing, unsupported: answer.unsupported });
      } while (next && messages.length < target);
    } catch (error) { if (number === run.current) setState((old) => ({ ...old, running: false, error })); }
  };
  const reload = () => fetchMore(null, [], 0);
  const stop = () => { run.current += 1; setState((old) => ({ ...old, running: false })); };
  useEffect(() => { reload(); return () => { run.current += 1; }; }, [key]);
  return { ...state, reload, stop, more: () => fetchMore(state.next, state.messages, state.scanned) };
}

const nameOf = (message) => `${message.node} ${message.id}`;

function Look({ topic, channel, state }) {
  const { query } = useStore(address);
  const filters = { filter: query.filter, path: query.path, equals: query.path ? query.equals : "", reason: state === "dead" ? query.reason : "" };
  const isFiltered = Object.values(filters).some(Boolean);
  const found = useMessages({ topic, channel, state, ...filters });
  const [selected, setSelected] = useState(new Set());
  const [acting, setActing] = useState(null);
  const { messages } = found;
  const chosen = messages.find((message) => nameOf(message) === query.message) || null;
  const toggle = (message) => {
    const next = new Set(selected);
    if (!next.delete(nameOf(message))) next.add(nameOf(message));
    setSelected(next);
  };
  const choose = (message) => setQuery({ message: message ? nameOf(message) : "" });
  const key = (event) => {
    const step = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
    if (!step || !messages.length || event.target.type === "checkbox") return;
    event.preventDefault();
    const at = Math.min(messages.length - 1, Math.max(0, messages.indexOf(chosen) + step));
    choose(messages[at]);
    event.currentTarget.querySelectorAll("li > button")[at]?.focus();
  };
  const isQueue = ["ready", "in_flight", "deferred"].includes(state);
  const done = () => { setSelected(new Set()); setActing(null); found.reload(); };
  const picked = messages.filter((message) => selected.has(nameOf(message)));
  return html`<div class="list-head">
      <${Filter} value=${query.filter} placeholder="Text in the body" label="Text in the body" onInput=${(text) => setQuery({ filter: text, message: "" })} />
      <${Filter} value=${query.path} placeholder="JSON path: $.user.id" label="JSON path" onInput=${(text) => setQuery({ path: text, message: "" })} />
      ${query.path ? html`<span class="quiet">=</span><${Filter} value=${query.equals} placeholder="any value" label="Value at the JSON path" onInput=${(text) => setQuery({ equals: text, message: "" })} />` : null}
      ${state === "dead" ? html`<select aria-label="Reason" value=${query.reason || ""} onChange=${(event) => setQuery({ reason: event.target.value })}><option value="">any reason</option>${["requeued", "timed out", "expired"].map((one) => html`<option key=${one}>${one}</option>`)}</select>` : null}
      <button onClick=${found.reload} disabled=${found.running}>Refresh</button>
    </div>
    <${Progress} found=${found} isFiltered=${isFiltered} />
    <${Missing} nodes=${found.missing} />${found.unsupported?.length ? html`<p class="missing">NSQ's own nsqd does not show messages: ${found.unsupported.join(", ")}</p>` : null}
    <${Failure} error=${found.error} retry=${found.reload} />
    ${isQueue && messages.length ? html`<div class="bulk-bar"><label class="check"><input type="checkbox" checked=${picked.length === messages.length} onChange=${() => setSelected(picked.length === messages.length ? new Set() : new Set(messages.map(nameOf)))} />${picked.length ? `${exact(picked.length)} selected` : "Select all shown"}</label>
      <span class="actions">${["finish", "requeue", "defer"].map((kind) => html`<button key=${kind} class="small" disabled=${!picked.length} onClick=${() => setActing({ kind, picked })}>${VERBS[kind]} …</button>`)}</span>
      <span class="grow"></span><span class="actions"><button class="small" onClick=${() => setActing({ kind: "", all: true })}>${isFiltered ? "All that match …" : `All ${state.replace("_", " ")} …`}</button></span></div>` : null}
    ${state === "dead" && messages.length && may("operate") ? html`<div class="bulk-bar"><span class="quiet">Dead letters go back to this channel, their attempts start anew.</span><span class="grow"></span><button class="small" onClick=${() => setActing({ redrive: true })}>Redrive …</button></div>` : null}
    ${!messages.length && !found.running && !found.error ? html`<${Nothing} state=${state} isFiltered=${isFiltered} topic=${topic} scanned=${found.scanned} />` : html`<div class="split">
      <div><ul class="message-list" aria-label="messages" onKeyDown=${key}>${messages.map((message) => html`<${Row} key=${nameOf(message)} message=${message} state=${state} isChosen=${message === chosen} isSelected=${selected.has(nameOf(message))} onChoose=${choose} onToggle=${isQueue ? toggle : null} />`)}</ul>
        ${found.next && !found.running ? html`<div class="pager"><button onClick=${found.more}>Load more</button></div>` : null}</div>
      <div class="detail">${chosen ? html`<${Detail} key=${nameOf(chosen)} message=${chosen} topic=${topic} channel=${channel} state=${state} onAct=${(kind) => setActing({ kind, picked: [chosen] })} canAct=${isQueue} onClose=${() => choose(null)} />`
        : html`<div class="empty">${messages.length ? "Choose a message to see its body. The arrow keys move." : html`<${Loading} />`}</div>`}</div></div>`}
    ${acting?.redrive ? html`<${RedriveDialog} topic=${topic} channel=${channel} reason=${filters.reason} onClose=${done} />` : acting ? html`<${BulkDialog} target=${{ topic, channel, state, ...filters }} acting=${acting} isFiltered=${isFiltered} onClose=${() => setActing(null)} onDone=${done} />` : null}`;
}

function Progress({ found, isFiltered }) {
  const words = isFiltered
    ? `${exact(found.messages.length)} found, ${exact(found.scanned)}${found.total ? ` of ${exact(Math.max(found.total, found.scanned))}` : ""} searched`
    // How many a log has is not counted.
    : !found.messages.length ? "" : found.total > found.messages.length ? `${exact(found.messages.length)} of ${exact(found.total)} shown` : `${exact(found.messages.length)} shown${found.next ? ", there are more" : ""}`;
  return html`<div class="row progress-line"><span class="quiet" role="status">${words}</span>${found.running && isFiltered ? html`<progress aria-label="Searched" max=${found.total || 1} value=${found.total ? found.scanned : undefined}></progress><button class="small" onClick=${found.stop}>Stop</button>` : null}
    ${!found.running && found.next && isFiltered ? html`<button class="small" onClick=${found.more}>Search further</button>` : null}</div>`;
}

function Row({ message, state, isChosen, isSelected, onChoose, onToggle }) {
  const line = useMemo(() => (message.damaged ? "damaged: its file cannot be read" : firstLine(fromBase64(message.body))), [message]);
  return html`<li aria-current=${isChosen}>${onToggle ? html`<input type="checkbox" checked=${isSelected} onChange=${() => onToggle(message)} aria-label=${`Select ${message.id}`} />` : null}
    <button onClick=${() => onChoose(message)}><span class="line">${line || "empty"}</span><span class="meta"><${Ago} at=${message.time} /><span class="mono">${message.id}</span>
      ${state !== "log" ? html`<span>${many(message.dead ? message.dead.attempts : message.attempts, "attempts")}</span>` : null}<span>${bytes(message.size)}</span>
      ${message.due ? html`<span>due <${Ago} at=${message.due} /></span>` : null}${message.client ? html`<span>${message.client.client_id}</span>` : null}${message.dead ? html`<${Label} kind="amber">${message.dead.reason}</${Label}>` : null}</span></button></li>`;
}

const VERBS = { finish: "Finish", requeue: "Requeue", defer: "Defer" };

function Detail({ message, topic, channel, state, onAct, canAct, onClose }) {
  const { data, error } = useApi(message.truncated ? "/message" : null, { node: message.node, topic, channel, state, id: message.id });
  const whole = data?.message || message;
  const body = useMemo(() => fromBase64(whole.body), [whole.body]);
  const { dead } = message;
  const past = [
    ["Published", (dead?.published ?? message.time) && html`${clock(dead?.published ?? message.time)} (<${Ago} at=${dead?.published ?? message.time} />)`],
    state !== "log" && ["Attempts", dead ? dead.attempts : message.attempts], dead && ["Died", html`${clock(dead.time)}, ${dead.reason}`],
    dead && ["Was", html`<span class="mono">${dead.id}</span> in ${dead.topic}/${dead.channel}`], dead?.path?.length > 1 && ["Way", dead.path.join(" → ")],
    message.due && ["Due", html`${clock(message.due)} (<${Ago} at=${message.due} />)`], message.deadline && ["Times out", html`${clock(message.deadline)} (<${Ago} at=${message.deadline} />)`],
    message.client && ["Held by", `${message.client.client_id} ${message.client.remote_address || ""}`], ["Node", message.node], ["Sequence", html`<span class="mono">${message.seq}</span>`], ["Size", `${exact(message.size)} bytes`],
  ].filter(Boolean);
  return html`<section class="panel" aria-label="Message"><div class="row"><h2 class="first mono">${message.id}</h2><span class="grow"></span>
      ${canAct ? html`<span class="actions">${["finish", "requeue", "defer"].map((kind) => html`<button key=${kind} class="small" onClick=${() => onAct(kind)}>${VERBS[kind]} …</button>`)}</span>` : null}
      <button class="icon" aria-label="Close" onClick=${onClose}>✕</button></div>
    ${message.damaged ? html`<p class="failure">Its file is damaged: only the id is known. Consumers will not get it.</p>` : html`<${Body} data=${body} truncated=${whole.truncated && !error} />`}
    ${error ? html`<p class="missing">${error.words} Shown is its beginning.</p>` : null}
    <dl class="facts">${past.map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl></section>`;
}

const TEACH = {
  ready: ["Nothing waits", "Every message of this channel is delivered, or on its way."],
  in_flight: ["Nothing is in flight", "Here are the messages that consumers hold and have not finished yet."],
  deferred: ["Nothing is deferred", "Messages that were published or requeued with a delay wait here until they are due."],
  dead: ["No dead letters", "Set max-attempts in the settings of this channel: messages that fail that often are then moved out of the way and kept here."],
  log: ["The log is empty", "Here are all messages that the topic still has, also those that every channel has finished, for as long as retain-age and retain-bytes say."],
};

function Nothing({ state, isFiltered, topic, scanned }) {
  if (isFiltered) return html`<${Empty} title="No message matches"><p>${exact(scanned)} were searched.</p><button onClick=${() => setQuery({ filter: "", path: "", equals: "", reason: "" })}>Clear the filter</button></${Empty}>`;
  return html`<${Empty} title=${TEACH[state][0]}><p>${TEACH[state][1]}</p>${state === "log" ? html`<${FirstPublish} topic=${topic} />` : null}</${Empty}>`;
}

// --- Act on many: counted first, then done, as a job of the daemon

/** Run a job to its end; `onChange` gets it each time that it is looked at. */
export async function follow(job, onChange, isWanted) {
  let now = job;
  onChange(now);
  while (now.state === "running" && isWanted()) {
    await new Promise((resolve) => { setTimeout(resolve, 300); });
    now = await api(`/jobs/${encodeURIComponent(now.id)}`);
    onChange(now);
  }
  return now;
}

const DELAYS = [["10", "10 s"], ["60", "1 min"], ["600", "10 min"], ["3600", "1 h"]];
const EFFECT = {
  finish: "They are never delivered again to this channel. This cannot be undone.",
  requeue: "They are ready at once. Consumers that hold them cannot finish them any more.",
  defer: "They are ready again after the delay.",
};

function BulkDialog({ target, acting, isFiltered, onClose, onDone }) {
  const [kind, setKind] = useState(acting.kind);
  const [delay, setDelay] = useState("60");
  const [counted, setCounted] = useState(null);
  const [job, setJob] = useState(null);
  const [failure, setFailure] = useState(null);
  const here = useRef(true);
  useEffect(() => {
    here.current = true;
    if (acting.all) {
      api("/jobs", { method: "POST", body: { kind: "count", ...Object.fromEntries(Object.entries(target).filter(([, value]) => value)) } })
        .then((started) => follow(started, (now) => here.current && setCounted(now), () => here.current)).catch(setFailure);
    }
    return () => { here.current = false; };
  }, []);
  const number = acting.all ? counted?.matched : acting.picked.length;
  const isCounted = !acting.all || (counted && counted.state === "done");
  const start = async (event) => {
    event.preventDefault();
    setFailure(null);
    const { topic, channel } = target;
    const given = acting.all ? { of: counted.id } : { topic, channel, messages: acting.picked.map(({ node, id }) => ({ node, id })) };
    try {
      const started = await api("/jobs", { method: "POST", body: { kind, ...given, delay: kind === "defer" ? Number(delay) * 1000 : undefined } });
      const ended = await follow(started, (now) => here.current && setJob(now), () => true);
      const rest = [ended.gone && `${exact(ended.gone)} were gone`, ended.failed && `${exact(ended.failed)} failed${ended.errors?.length ? `: ${ended.errors[0]}` : ""}`].filter(Boolean).join(", ");
      notify(`${VERBS[kind]}: ${exact(ended.done)} messages${rest ? `; ${rest}` : ""}${ended.state === "stopped" ? ", stopped" : ""}.`, ended.failed || ended.state === "failed" ? "error" : "info");
      if (here.current) onDone();
    } catch (error) { setFailure(error); }
  };
  const stop = () => api(`/jobs/${encodeURIComponent((job || counted).id)}`, { method: "DELETE" }).catch(setFailure);
  const where = `${target.topic}/${target.channel}`;
  return html`<${Dialog} title=${acting.all ? `${isFiltered ? "All that match" : `All ${target.state.replace("_", " ")} messages`} in ${where}` : `${VERBS[kind]} ${number === 1 ? "1 message" : `${exact(number)} messages`} in ${where}?`} onClose=${onClose}>
    <form onSubmit=${start}>
      ${acting.all ? html`<p class="counted" role="status">${counted ? html`<b>${exact(counted.matched)}</b> of ${exact(Math.max(counted.total ?? 0, counted.scanned))} match${counted.state === "running" ? " so far …" : counted.complete ? "" : ", and more: these come first"}` : "Counting …"}</p>
        ${counted?.state === "running" ? html`<progress aria-label="Counted" max=${counted.total || 1} value=${counted.scanned}></progress>` : null}
        <div class="ranges" role="group" aria-label="What to do">${Object.entries(VERBS).map(([name, verb]) => html`<button type="button" key=${name} aria-pressed=${name === kind} onClick=${() => setKind(name)}>${verb}</button>`)}</div>` : null}
      <p>${EFFECT[kind] || "Choose what to do with them."}</p>
      ${kind === "defer" ? html`<label>Delay<select name="delay" value=${delay} onChange=${(event) => setDelay(event.target.value)}>${DELAYS.map(([value, words]) => html`<option key=${value} value=${value}>${words}</option>`)}</select></label>` : null}
      ${job ? html`<p role="status">${exact(job.done)} of ${exact(job.matched ?? number)} done</p><progress aria-label="Done" max=${job.matched || number || 1} value=${job.done + job.gone + job.failed}></progress>` : null}
      <${Failure} error=${failure} />
      <footer><button class=${kind === "finish" ? "danger" : "primary"} disabled=${!kind || !isCounted || !number || (job && job.state === "running")}>${kind ? `${VERBS[kind]} ${number ? exact(number) : ""}` : "Go"}</button>
        ${(job || counted)?.state === "running" ? html`<button type="button" onClick=${stop}>Stop</button>` : null}<span class="grow"></span><button type="button" onClick=${onClose}>Cancel</button></footer></form></${Dialog}>`;
}

// --- Tail: new messages of a topic, from its log

const MOST_LINES = 200;

function Tail({ topic }) {
  const { query } = useStore(address);
  const [paused, setPaused] = useState(false);
  const [lines, setLines] = useState([]);
  const [skipped, setSkipped] = useState(0);
  const [state, setState] = useState("connecting");
  const [about, setAbout] = useState(null);
  const [chosen, setChosen] = useState(null);
  const rate = query.rate || "50";
  useEffect(() => {
    if (paused) { setState("paused"); return undefined; }
    setState("connecting");
    let waiting = [];
    const source = new EventSource(link("/api/v2/tail", { topic, rate, bytes: 4096, filter: query.filter }));
    const on = (name, act) => source.addEventListener(name, (event) => act(event.data === undefined ? null : JSON.parse(event.data)));
    on("hello", (hello) => { setState("live"); setAbout(hello); });
    on("message", (message) => waiting.push(message));
    on("skipped", (more) => setSkipped((old) => old + more.count));
    source.addEventListener("error", (event) => {
      if (event.data) notify(`${JSON.parse(event.data).node}: ${JSON.parse(event.data).message}`, "error");
      else setState("disconnected");
    });
    const timer = setInterval(() => {
      if (!waiting.length) return;
      const fresh = waiting.reverse();
      waiting = [];
      setLines((old) => [...fresh, ...old].slice(0, MOST_LINES));
    }, 250);
    return () => { clearInterval(timer); source.close(); };
  }, [topic, rate, query.filter, paused]);
  return html`<div class="list-head"><${Filter} value=${query.filter} placeholder="Text in the body" label="Text in the body" onInput=${(text) => setQuery({ filter: text })} />
      <select aria-label="At most" value=${rate} onChange=${(event) => setQuery({ rate: event.target.value === "50" ? "" : event.target.value })}>${["10", "50", "200", "500"].map((one) => html`<option key=${one} value=${one}>at most ${one}/s</option>`)}</select>
      <button aria-pressed=${paused} onClick=${() => setPaused(!paused)}>${paused ? "Go on" : "Pause"}</button><button disabled=${!lines.length} onClick=${() => { setLines([]); setSkipped(0); setChosen(null); }}>Clear</button>
      <span class=${`dot ${state}`} role="status">${state}</span><span class="quiet">${exact(lines.length)} shown${skipped ? `, ${exact(skipped)} skipped` : ""}</span></div>
    <p class="quiet">Read from the log: no channel is created, and nobody loses a message.${about?.unsupported?.length ? ` Not from ${about.unsupported.join(", ")}: NSQ's own nsqd has no log.` : ""}</p>
    ${lines.length ? html`<div class="split"><ul class="message-list" aria-label="new messages">${lines.map((message) => html`<${Row} key=${nameOf(message)} message=${message} state="log" isChosen=${message === chosen} onChoose=${setChosen} />`)}</ul>
      <div class="detail">${chosen ? html`<${Detail} key=${nameOf(chosen)} message=${chosen} topic=${topic} channel="" state="log" onClose=${() => setChosen(null)} />` : html`<div class="empty">Choose a message to see its body.</div>`}</div></div>`
      : html`<${Empty} title=${paused ? "Paused" : "Waiting for messages"}><p>${paused ? "Messages that come meanwhile are not shown; they are in the log." : "Each message that is published from now on appears here."}</p></${Empty}>`}`;
}

