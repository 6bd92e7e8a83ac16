// The frame around every page: navigation, search, the state of the connection, login, notices; and the router.
import {
  html, render, useState, useEffect, useRef, useStore, useScope, A, BASE, VERSION, address, api, connection, dismiss, duration, go,
  loadSession, needLogin, notices, notify, restarts, session,
} from "./lib.js";
import { Failure, Loading } from "./ui.js";
import { Overview } from "./pages/overview.js";
import { Topic, Topics } from "./pages/topics.js";
import { Channel } from "./pages/channel.js";
import { Messages } from "./pages/messages.js";
import { Clients } from "./pages/clients.js";
import { Lookup, Node, Nodes } from "./pages/nodes.js";
import { Dead } from "./pages/dead.js";
import { Pipelines } from "./pages/pipelines.js";
import { ActionLog, Counter } from "./pages/actions.js";

const ICONS = {
  overview: "M3 12h4l3-8 4 16 3-8h4",
  topics: "M4 6h16M4 12h16M4 18h10",
  nodes: "M4 4h16v6H4zM4 14h16v6H4zM8 7h.01M8 17h.01",
  clients: "M9 11a4 4 0 1 0 0-8 4 4 0 0 0 0 8zM2 21a7 7 0 0 1 14 0M17 3a4 4 0 0 1 0 8M18 14a7 7 0 0 1 4 7",
  dead: "M4 7h16M9 7V4h6v3M6 7l1 13h10l1-13M10 11v5M14 11v5",
  pipelines: "M4 6h6l4 12h6M14 6h6M4 18h6",
  lookup: "M11 19a8 8 0 1 0 0-16 8 8 0 0 0 0 16zM21 21l-4-4",
  actions: "M12 7v5l3 2M21 12a9 9 0 1 1-3-6.7M21 3v4h-4",
};

const Icon = ({ name }) => html`<svg viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="1.75" stroke-linecap="round" stroke-linejoin="round" aria-hidden="true"><path d=${ICONS[name]} /></svg>`;

const RAIL = [
  ["overview", "Overview", "/"], ["topics", "Topics", "/topics"], ["nodes", "Nodes", "/nodes"], ["clients", "Clients", "/clients", "wide-only"],
  ["dead", "Dead letters", "/dead"], ["pipelines", "Pipelines", "/pipelines"], ["lookup", "Lookup", "/lookup", "wide-only"], ["actions", "Actions", "/actions"],
];

function isHere(path, to) {
  if (to === "/") return path === "/";
  return path === to || path.startsWith(`${to}/`) || (to === "/topics" && path === "/messages");
}

function Rail({ cluster }) {
  const { path } = useStore(address);
  const problems = cluster?.problem_count;
  const worst = Math.max(0, ...Object.values(cluster?.problems || {}).map((problem) => problem.level));
  return html`<nav class="rail" aria-label="Pages">
    <${A} to="/" class="brand"><img src=${`${BASE}/static/logo.svg`} alt="" />flintmq</${A}>
    ${RAIL.map(([icon, title, to, kind]) => html`<${A} key=${to} to=${to} class=${`item ${kind || ""}`} aria-current=${isHere(path, to) ? "page" : undefined}>
      <${Icon} name=${icon} />${title}${to === "/" && problems ? html`<span class=${`badge ${worst > 2 ? "critical" : worst > 1 ? "warning" : ""}`}>${problems}<span class="sr"> problems</span></span>` : null}</${A}>`)}
    <p class="foot">flintmq ${VERSION}<br /><${A} to="/counter">Message counter</${A}></p>
  </nav>`;
}

// --- Search: `/` opens it, arrows move, Enter goes

function Search() {
  const [text, setText] = useState("");
  const [found, setFound] = useState(null);
  const [at, setAt] = useState(0);
  const [open, setOpen] = useState(false);
  const input = useRef(null);
  useEffect(() => {
    const key = (event) => {
      if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
      if (/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
      event.preventDefault();
      input.current?.focus();
      input.current?.select();
    };
    document.addEventListener("keydown", key);
    return () => document.removeEventListener("keydown", key);
  }, []);
  useEffect(() => {
    const wanted = text.trim();
    if (!wanted) { setFound(null); return undefined; }
    const control = new AbortController();
    let timer = 0;
    const ask = () => api("/search", { query: { q: wanted, limit: 12 }, signal: control.signal }).then((answer) => {
      setFound(answer);
      setAt((old) => Math.min(old, Math.max(0, answer.results.length - 1)));
      if (answer.clients === "loading") timer = setTimeout(ask, 1000);
    }).catch(() => {});
    timer = setTimeout(ask, 120);
    return () => { clearTimeout(timer); control.abort(); };
  }, [text]);
  const results = open && found ? found.results : [];
  const choose = (result) => { setText(""); setOpen(false); input.current?.blur(); go(result.link); };
  const key = (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      const step = event.key === "ArrowDown" ? 1 : -1;
      if (results.length) setAt((at + step + results.length) % results.length);
    } else if (event.key === "Enter" && results[at]) choose(results[at]);
    else if (event.key === "Escape") { if (text) setText(""); else input.current.blur(); setOpen(false); }
  };
  return html`<div class="search" role="search">
    <${Icon} name="lookup" />
    <input ref=${input} type="text" role="combobox" aria-label="Search topics, channels, nodes and clients" aria-expanded=${results.length > 0} aria-controls="found"
      aria-activedescendant=${results.length ? `found-${at}` : undefined} aria-autocomplete="list" aria-keyshortcuts="/" autocomplete="off" spellcheck=${false}
      placeholder="Topic, channel, node, client …" value=${text} onInput=${(event) => { setText(event.target.value); setOpen(true); setAt(0); }}
      onKeyDown=${key} onFocus=${() => setOpen(true)} onBlur=${() => setOpen(false)} />
    <kbd aria-hidden="true">/</kbd>
    ${open && found && text.trim() ? html`<ul id="found" role="listbox" aria-label="Found">
      ${results.map((result, index) => html`<li key=${result.kind + result.name + result.link} id=${`found-${index}`} role="option" aria-selected=${index === at} onMouseDown=${(event) => { event.preventDefault(); choose(result); }}>
        <span class="label">${result.kind}</span><b>${result.name}</b><span class="quiet">${result.detail}</span></li>`)}
      ${results.length ? null : html`<li role="option" aria-disabled="true" class="quiet">${found.clients === "loading" ? "Still asking for the clients …" : `Nothing is named “${text.trim()}”.`}</li>`}</ul>` : null}
  </div>`;
}

// --- The bar

function Live() {
  const { state, since } = useStore(connection);
  const [, again] = useState(0);
  useEffect(() => {
    if (state !== "disconnected") return undefined;
    const timer = setInterval(() => again((number) => number + 1), 1000);
    return () => clearInterval(timer);
  }, [state]);
  useEffect(() => { document.body.classList.toggle("disconnected", state === "disconnected"); }, [state]);
  const words = { live: "live", paused: "paused", connecting: "connecting", disconnected: `disconnected for ${duration((Date.now() - since) / 1000)}` }[state];
  return html`<span class=${`dot ${state}`} role="status" title="Numbers come as they change, and pause while this tab is hidden.">${words}</span>`;
}

function NodesUp({ cluster }) {
  const nodes = Object.values(cluster?.nodes || {});
  if (!nodes.length) return null;
  const up = nodes.filter((node) => node.up).length;
  return html`<${A} to="/nodes" class=${`nodes-up ${up < nodes.length ? "down" : ""}`}>${up < nodes.length ? "▲ " : ""}${up}/${nodes.length} nodes</${A}>`;
}

function Theme() {
  const [theme, setTheme] = useState(document.documentElement.dataset.theme || "");
  const dark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const change = () => {
    const next = dark ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try { localStorage.setItem("flintmq-theme", next); } catch { /* for this page only */ }
    setTheme(next);
  };
  return html`<button class="icon" onClick=${change} aria-label=${dark ? "Light theme" : "Dark theme"} title=${dark ? "Light theme" : "Dark theme"}>◐</button>`;
}

function Who() {
  const now = useStore(session);
  if (!now || now.login === "off") return null;
  if (now.login === "none") return html`<span class="label amber" title="Start nsqadmin with --users-file, or --admin-user behind a proxy, to log in here.">${now.nsq_actions ? "no login" : "view only"}</span>`;
  if (!now.user) return now.login === "password" ? html`<${A} to="/login">Log in</${A}>` : html`<span class="label amber">not logged in</span>`;
  const leave = async () => {
    try { session.set(await api("/logout", { method: "POST" })); go("/login"); } catch (error) { notify(error.words, "error"); }
  };
  return html`<span class="who"><b>${now.user}</b> <span class="quiet">${now.role}</span>${now.login === "password" ? html` <button class="small" onClick=${leave}>Log out</button>` : null}</span>`;
}

function Notices() {
  const list = useStore(notices);
  return html`<div class="notices" aria-live="polite">${list.map((notice) => html`<div key=${notice.id} class=${`notice ${notice.kind}`} role=${notice.kind === "error" ? "alert" : "status"}>
    <span>${notice.text}</span>${notice.undo ? html`<button class="small" onClick=${() => { dismiss(notice); notice.undo(); }}>Undo</button>` : null}
    <button class="icon" aria-label="Dismiss" onClick=${() => dismiss(notice)}>✕</button></div>`)}</div>`;
}

// --- Login

function Login() {
  const now = useStore(session);
  const [failure, setFailure] = useState(null);
  const [busy, setBusy] = useState(false);
  const enter = async (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    setBusy(true);
    setFailure(null);
    try {
      session.set(await api("/login", { method: "POST", body: { user: form.get("user"), password: form.get("password") } }));
      needLogin.set(false);
      restarts.set(restarts.get() + 1);
      if (address.get().path === "/login") go(address.get().query.to || "/", {}, { replace: true });
    } catch (error) { setFailure(error); } finally { setBusy(false); }
  };
  if (now?.login !== "password") {
    return html`<main class="login panel"><h1>Log in</h1>
      <p>${now?.login === "off" ? "Nobody has to log in here." : now?.login === "proxy" ? "The proxy in front of nsqadmin says who you are." : "This nsqadmin has no users. Start it with --users-file to log in here."}</p>
      <p><${A} to="/">Overview</${A}></p></main>`;
  }
  return html`<main class="login panel"><h1>Log in to flintmq</h1><form onSubmit=${enter}>
    <label>User<input name="user" autocomplete="username" required autofocus /></label>
    <label>Password<input name="password" type="password" autocomplete="current-password" required /></label>
    ${failure ? html`<p class="failure" role="alert">${failure.code === "TOO_MANY_ATTEMPTS" ? `Too many attempts. Try again in ${duration(failure.answer.retry_after)}.` : failure.words}</p>` : null}
    <button class="primary" disabled=${busy}>Log in</button></form></main>`;
}

// --- The router

const ROUTES = { "/": Overview, "/topics": Topics, "/nodes": Nodes, "/clients": Clients, "/messages": Messages, "/lookup": Lookup, "/dead": Dead, "/pipelines": Pipelines, "/actions": ActionLog, "/counter": Counter };

function Page() {
  const { path } = useStore(address);
  const whole = ROUTES[path];
  if (whole) return html`<${whole} key=${path} />`;
  const [, kind, ...rest] = path.split("/");
  const parts = rest.map(decodeURIComponent);
  if (kind === "topics" && parts.length === 1) return html`<${Topic} key=${path} topic=${parts[0]} />`;
  if (kind === "topics" && parts.length === 2) return html`<${Channel} key=${path} topic=${parts[0]} channel=${parts[1]} />`;
  if (kind === "nodes" && parts.length === 1) return html`<${Node} key=${path} node=${parts[0]} />`;
  return html`<h1>There is no such page</h1><p><${A} to="/">Overview</${A}></p>`;
}

function App() {
  const now = useStore(session);
  const { path } = useStore(address);
  const asked = useStore(needLogin);
  const [error, setError] = useState(null);
  const load = () => loadSession().then(() => setError(null), setError);
  useEffect(() => { load(); }, []);
  useEffect(() => { if (now?.role || (now && now.login !== "password")) needLogin.set(false); }, [now]);
  if (error && !now) return html`<main><${Failure} error=${error} retry=${load} /></main>`;
  if (!now) return html`<${Loading} />`;
  if (path === "/login" || asked || (now.login === "password" && !now.role)) return html`<${Login} /><${Notices} />`;
  return html`<${Frame} />`;
}

function Frame() {
  const cluster = useScope("cluster");
  return html`<div class="frame"><a class="skip" href="#page" onClick=${(event) => { event.preventDefault(); document.getElementById("page").focus(); }}>Skip to the page</a>
    <${Rail} cluster=${cluster} />
    <header class="bar"><${Search} /><span class="grow"></span><${Live} /><${NodesUp} cluster=${cluster} /><${Who} /><${Theme} /></header>
    <div class="page"><main id="page" tabindex="-1"><${Page} /></main></div><${Notices} /></div>`;
}

const root = document.getElementById("app");
root.textContent = "";
render(html`<${App} />`, root);
