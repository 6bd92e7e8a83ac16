// What every page uses: Preact with htm, the address as state, requests to the daemon, its event stream, and formats.
import { h, render, Fragment } from "../vendor/preact.mjs";
import { useState, useEffect, useRef, useMemo, useCallback, useReducer } from "../vendor/hooks.mjs";
import htm from "../vendor/htm.mjs";

export const html = htm.bind(h);
export { render, Fragment, useState, useEffect, useRef, useMemo, useCallback };

export const BASE = document.documentElement.dataset.base || "";
export const VERSION = document.documentElement.dataset.version;

// --- Stores: values that several components show

export function store(value) {
  const listeners = new Set();
  return {
    get: () => value,
    set(next) { value = next; for (const listener of [...listeners]) listener(); },
    listen(listener) { listeners.add(listener); return () => listeners.delete(listener); },
  };
}

export function useStore(source) {
  const [, again] = useReducer((count) => count + 1, 0);
  useEffect(() => source.listen(again), [source]);
  return source.get();
}

// --- The address: path and query are the state of a page

function readAddress() {
  let path = location.pathname;
  if (BASE && path.startsWith(BASE)) path = path.slice(BASE.length);
  path = path.replace(/\/+$/, "") || "/";
  return { path, query: Object.fromEntries(new URLSearchParams(location.search)) };
}

export const address = store(readAddress());
window.addEventListener("popstate", () => address.set(readAddress()));

/** The URL of a path below the base path, with a query of the values that are not empty. */
export function link(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const search = new URLSearchParams(given).toString();
  return BASE + path + (search ? (path.includes("?") ? "&" : "?") + search : "");
}

export function go(path, query, { replace = false } = {}) {
  history[replace ? "replaceState" : "pushState"](null, "", link(path, query));
  address.set(readAddress());
  if (!replace) window.scrollTo(0, 0);
}

/** Change parts of the query. Filters and sorting replace the entry: "back" leaves the page. */
export function setQuery(changes, { replace = true } = {}) {
  const { path, query } = address.get();
  go(path, { ...query, ...changes }, { replace });
}

export const topicPath = (topic) => `/topics/${encodeURIComponent(topic)}`;
export const channelPath = (topic, channel) => `${topicPath(topic)}/${encodeURIComponent(channel)}`;
export const nodePath = (node) => `/nodes/${encodeURIComponent(node)}`;

/** A link inside the pages: no request for a document, and a new tab with the usual keys. */
export function A({ to, query, children, ...rest }) {
  const follow = (event) => {
    if (event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    go(to, query);
  };
  return html`<a href=${link(to, query)} onClick=${follow} ...${rest}>${children}</a>`;
}

// --- Requests

export class ApiError extends Error {
  constructor(status, answer) {
    super(answer?.message || `the daemon answered ${status}`);
    this.status = status;
    this.answer = answer;
    this.code = (answer?.message || "").split(":")[0];
  }
  /** The sentence behind the code, for people. */
  get words() { const at = this.message.indexOf(": "); return at > 0 ? this.message.slice(at + 2) : SENTENCES[this.message] || this.message; }
}

const SENTENCES = {
  TOPIC_NOT_FOUND: "There is no such topic: no node has it, and no nsqlookupd knows it. Perhaps it was deleted.",
  CHANNEL_NOT_FOUND: "There is no such channel: no node has it. Perhaps it was deleted.",
  NODE_NOT_FOUND: "There is no such node in the cluster. Perhaps it was stopped, or has another address now.",
  CLIENT_NOT_FOUND: "This client is not connected any more.",
};

export const session = store(null);

export async function api(path, { method = "GET", query, body, signal } = {}) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const csrf = session.get()?.csrf;
  if (method !== "GET" && csrf) headers["X-Flintmq-Csrf"] = csrf;
  let response;
  try {
    response = await fetch(link(`/api/v2${path}`, query), {
      method, headers, signal, credentials: "same-origin", body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "UNREACHABLE: nsqadmin does not answer" });
  }
  let answer = null;
  try { answer = await response.json(); } catch { /* an error of something in between has no JSON */ }
  if (!response.ok) {
    const error = new ApiError(response.status, answer);
    if (response.status === 401 && error.code === "LOGIN_REQUIRED" && session.get()?.login === "password") needLogin.set(true);
    throw error;
  }
  return answer;
}

export const needLogin = store(false);

export async function loadSession() {
  session.set(await api("/session"));
  return session.get();
}

const RANKS = { view: 1, operate: 2, admin: 3 };
export const may = (role) => (RANKS[session.get()?.role] || 0) >= RANKS[role];
/** NSQ's own actions are open to whom NSQ would let, whatever the role. */
export const mayAct = (role) => may(role) || Boolean(session.get()?.nsq_actions && session.get().login !== "password");

const SAMPLED = /^\/(overview|topics|channels|nodes)/;

/** Load something when its key changes and, while the tab is live, again every so many milliseconds. */
export function useApi(path, query = {}, { every = 0 } = {}) {
  const [state, setState] = useState({ data: null, error: null, loading: true });
  const key = path === null ? null : JSON.stringify([path, query]);
  const running = useRef(null);
  const again = useRef(false);
  const load = useCallback(async () => {
    if (key === null || running.current) return;
    again.current = false;
    const control = new AbortController();
    running.current = control;
    try {
      const data = await api(path, { query, signal: control.signal });
      if (running.current === control) setState({ data, error: null, loading: false, key });
    } catch (error) {
      if (running.current === control) setState((old) => ({ data: old.key === key ? old.data : null, error, loading: false, key }));
    } finally {
      if (running.current === control) {
        running.current = null;
        if (again.current) load();
      }
    }
  }, [key]);
  // After an action: an answer that is on its way may be older than it.
  const reload = useCallback(() => { again.current = Boolean(running.current); return load(); }, [load]);
  useEffect(() => {
    setState((old) => (old.loading ? old : { ...old, loading: true }));
    load();
    return () => { running.current?.abort(); running.current = null; };
  }, [load]);
  useEffect(() => {
    if (!every) return undefined;
    // The daemon says when its samples change; everything else is asked for by the clock.
    if (!SAMPLED.test(path)) {
      const timer = setInterval(() => { if (connection.get().state === "live") load(); }, every);
      return () => clearInterval(timer);
    }
    let last = Date.now();
    let timer = 0;
    // A change that comes too soon after the last load waits for its turn: it may be the last one for long.
    const leave = ticks.listen(() => {
      timer ||= setTimeout(() => { timer = 0; last = Date.now(); load(); }, Math.max(0, last + every - 200 - Date.now()));
    });
    return () => { leave(); clearTimeout(timer); };
  }, [load, every]);
  return { ...state, reload };
}

// --- The event stream: one for each tab, closed while the tab is hidden

export const connection = store({ state: "connecting", since: Date.now() });
/** Counts the samples of the daemon; lists load again when it moves. */
export const ticks = store(0);
const scopes = new Map(); // scope -> { count, source: store of the object }
let events = null;
let opened = "";
let retry = 0;
let pending = 0;
let boot = null;

function setConnection(state) {
  if (connection.get().state !== state) connection.set({ state, since: Date.now() });
}

function schedule() {
  if (!pending) pending = setTimeout(() => { pending = 0; reopen(); }, 0);
}

function reopen() {
  const wanted = [...scopes.keys()].sort().join(",");
  if (document.hidden) {
    events?.close();
    events = null;
    opened = "";
    setConnection("paused");
    return;
  }
  if (!wanted || (events && opened === wanted && events.readyState !== EventSource.CLOSED)) return;
  events?.close();
  opened = wanted;
  const source = (events = new EventSource(link("/api/v2/events", { scope: wanted })));
  const on = (name, act) => source.addEventListener(name, (event) => { if (source === events) act(JSON.parse(event.data)); });
  on("hello", (hello) => {
    retry = 0;
    const before = connection.get();
    setConnection("live");
    if (boot && boot !== hello.boot) {
      notify("nsqadmin was restarted. Its history begins anew.");
      loadSession().catch(() => {});
      restarts.set(restarts.get() + 1);
    } else if (before.state === "disconnected") {
      notify(`Connected again after ${duration((Date.now() - before.since) / 1000)}.`);
    }
    boot = hello.boot;
    ticks.set(ticks.get() + 1);
  });
  on("snapshot", ({ scope, at, data }) => scopes.get(scope)?.source.set({ at, ...data }));
  on("update", ({ scope, at, data }) => {
    const entry = scopes.get(scope);
    if (entry) entry.source.set({ ...merge(entry.source.get() || {}, data), at });
    if (scope === "cluster") ticks.set(ticks.get() + 1);
  });
  on("job", (job) => jobs.set({ ...jobs.get(), [job.id]: job }));
  on("action", (action) => lastAction.set(action));
  on("bye", ({ reason }) => { if (reason === "logout") loadSession().catch(() => {}); });
  source.onerror = () => {
    if (source !== events) return;
    setConnection("disconnected");
    if (source.readyState === EventSource.CLOSED) {
      opened = "";
      retry = Math.min(retry + 1, 6);
      setTimeout(schedule, 500 * 2 ** retry);
      // It was refused rather than lost: perhaps the login is over.
      loadSession().catch(() => {});
    }
  };
}

export const restarts = store(0);
export const jobs = store({});
export const lastAction = store(null);

/** Rows in maps come whole; the keys of the maps are merged, and `null` removes one. */
function merge(old, patch) {
  const result = { ...old };
  for (const [key, value] of Object.entries(patch)) {
    const isMap = ["nodes", "topics", "channels", "problems"].includes(key) && value && typeof value === "object" && !Array.isArray(value);
    if (!isMap) {
      const isRow = value && typeof value === "object" && !Array.isArray(value);
      result[key] = isRow ? { ...old[key], ...value } : value;
      continue;
    }
    const map = { ...(old[key] || {}) };
    for (const [name, row] of Object.entries(value)) { if (row === null) delete map[name]; else map[name] = row; }
    result[key] = map;
  }
  return result;
}

document.addEventListener("visibilitychange", schedule);
window.addEventListener("online", schedule);

export function useScope(scope) {
  const nothing = useMemo(() => store(null), []);
  const source = useMemo(() => {
    if (!scope) return nothing;
    if (!scopes.has(scope)) scopes.set(scope, { count: 0, source: store(null) });
    return scopes.get(scope).source;
  }, [scope]);
  useEffect(() => {
    if (!scope) return undefined;
    if (!scopes.has(scope)) scopes.set(scope, { count: 0, source });
    const entry = scopes.get(scope);
    entry.count += 1;
    schedule();
    return () => {
      entry.count -= 1;
      if (!entry.count) { scopes.delete(scope); schedule(); }
    };
  }, [scope]);
  return useStore(source);
}

// --- Notices

export const notices = store([]);
let noticeNumber = 0;
/** `undo`: a function that takes back what was done, offered as a button. */
export function notify(text, kind = "info", undo = null) {
  const notice = { id: ++noticeNumber, text, kind, undo };
  notices.set([...notices.get().slice(-3), notice]);
  setTimeout(() => dismiss(notice), kind === "error" || undo ? 12000 : 6000);
}
export const dismiss = (notice) => notices.set(notices.get().filter((other) => other !== notice));

// --- Formats

const whole = new Intl.NumberFormat("en-US");
const NONE = "–";

/** 1,204 up to a million, then 1.34M. */
export function count(value) {
  if (value === null || value === undefined) return NONE;
  return Math.abs(value) < 1e6 ? whole.format(Math.round(value)) : si(value);
}

/** "3 topics", "1 topic", "no topics". */
export const many = (value, things) => `${value ? exact(value) : "no"} ${value === 1 ? things.replace(/s$/, "") : things}`;

export const exact = (value) => (value === null || value === undefined ? NONE : whole.format(value));

function si(value) {
  const size = Math.abs(value);
  for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return `${(value / unit).toPrecision(3)}${name}`;
  }
  if (size >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return value.toPrecision(2);
}

export function rate(value, unit = "/s") {
  if (value === null || value === undefined) return NONE;
  if (Math.abs(value) < 0.05) return `0${unit}`;
  return `${si(value)}${unit}`;
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  let size = value;
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (Math.abs(size) < 1024 || unit === "TiB") return `${unit === "B" || size >= 100 ? Math.round(size) : size.toPrecision(3)} ${unit}`;
    size /= 1024;
  }
  return NONE;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  const size = Math.abs(seconds);
  if (size < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (size < 1) return `${(seconds * 1000).toPrecision(3)} ms`;
  if (size < 90) return `${Math.round(seconds)} s`;
  if (size < 5400) return `${Math.round(seconds / 60)} min`;
  if (size < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

/** The time of day, with 24 hours. */
export const time = (ms, seconds = true) => new Date(ms).toTimeString().slice(0, seconds ? 8 : 5);
export const clock = (ms) => `${new Date(ms).toLocaleDateString(undefined, { dateStyle: "medium" })}, ${time(ms)}`;
export const iso = (ms) => new Date(ms).toISOString();

// Moves the distances of times from now on.
const moments = store(0);
setInterval(() => { if (!document.hidden) moments.set(moments.get() + 1); }, 5000);

/** A time as its distance from now, with the absolute one on hover. */
export function Ago({ at }) {
  useStore(moments);
  if (at === null || at === undefined) return NONE;
  const seconds = (Date.now() - at) / 1000;
  const words = Math.abs(seconds) < 2 ? "now" : seconds >= 0 ? `${duration(seconds)} ago` : `in ${duration(-seconds)}`;
  return html`<time datetime=${iso(at)} title=${clock(at)}>${words}</time>`;
}
