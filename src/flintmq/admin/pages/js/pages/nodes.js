// The nodes, one node, and the nsqlookupds with what only they know.
import { html, useApi, useScope, useState, A, Ago, bytes, channelPath, clock, count, duration, exact, mayAct, may, nodePath, rate, session, topicPath } from "../lib.js";
import { Actions, Chart, Command, Crumbs, Empty, Failure, Label, Level, List, Loading, Missing, Problems, Ranges, Sparkline, Stat, Table, Unknown, counted, rated, useHistory, useRange, useTitle } from "../ui.js";
import { DEPTH, RATES } from "./overview.js";
import { CreateForm } from "./forms.js";

const STATES = (row) => html`${row.up ? html`<${Level} level=${row.trouble || 0} words=${false} />` : html`<${Level} level=${3} words=${false} />`} `;

export function Nodes() {
  useTitle("Nodes");
  const columns = (drawn) => [
    { key: "node", title: "Node", main: true, render: (row) => html`${STATES(row)}<${A} to=${nodePath(row.node)}>${row.hostname || row.node}</${A}>${row.up ? null : html` <${Label} kind="red">does not answer</${Label}>`}${row.draining ? html` <${Label} kind="amber">draining</${Label}>` : null}` },
    { key: "address", title: "Address", sort: null, render: (row) => row.node },
    { key: "version", title: "Version", card: false, render: (row) => html`${row.version || "–"}${row.kind === "nsq" ? " (Go)" : ""}${row.out_of_date ? html` <${Label} kind="amber">differs</${Label}>` : null}` },
    rated("published", "Published"),
    { key: "spark", title: "", sort: null, card: false, render: (row) => html`<${Sparkline} values=${drawn[row.node]?.published} label=${`published on ${row.node}, last hour`} />` },
    counted("depth", "Depth"),
    counted("topics", "Topics"),
    { key: "connections", title: "Connections", num: true, card: false, render: (row) => count(row.connections ?? row.clients) },
    { key: "disk_free", title: "Disk free", num: true, render: (row) => html`${bytes(row.disk_free)}${row.disk_full_in !== null && row.disk_full_in < 86400 ? html` <${Label} kind="amber">full in ${duration(row.disk_full_in)}</${Label}>` : null}` },
    { key: "started", title: "Up for", num: true, card: false, render: (row) => (row.up && row.started ? duration((Date.now() - row.started) / 1000) : html`<${Ago} at=${row.seen} />`) },
  ];
  return html`<div class="head"><h1>Nodes</h1><span class="actions phone-only"><${A} to="/clients">Clients</${A}><${A} to="/lookup">Lookup</${A}></span></div>
    <${List} path="/nodes" label="nodes" columns=${columns} name=${(row) => row.node} sparks=${{ kind: "node", series: ["published"] }}
    empty=${html`<${Empty} title="No nodes"><p>${session.get()?.mode === "nsqd" ? "None of the nsqd addresses answers." : "No nsqd has registered with nsqlookupd. Start one:"}</p><${Command}>${`nsqd --lookupd-tcp-address=127.0.0.1:4160`}</${Command}></${Empty}>`} />`;
}

export function Node({ node }) {
  useTitle(node);
  const live = useScope(`node:${node}`);
  const { data, error, reload } = useApi(`/nodes/${encodeURIComponent(node)}`, {}, { every: 10000 });
  const range = useRange();
  const past = useHistory("node", node, range, live?.node && { ...live.node, at: live.at });
  const crumbs = [["Nodes", "/nodes"], [node]];
  if (error && !data) return html`<${Unknown} crumbs=${crumbs} name=${node} error=${error} retry=${reload} />`;
  if (!data) return html`<${Loading} />`;
  const row = live?.node || data.node;
  const disk = row.disk_free !== null && row.disk_free !== undefined;
  const known = data.topics.map((one) => ({ ...one, ...(live?.topics?.[one.topic] || {}) }));
  return html`<div class="head"><${Crumbs} items=${crumbs} /><h1>${row.hostname || node}</h1>${row.up ? row.draining ? html`<${Label} kind="amber">draining</${Label}>` : html`<${Label} kind="green">up</${Label}>` : html`<${Label} kind="red">does not answer</${Label}>`}
      ${may("admin") && row.kind === "flintmq" && row.up && !row.draining ? html`<${Actions} items=${[{ action: "drain_node", node, label: "Drain …" }]} onDone=${reload} />` : null}</div>
    ${!row.up ? html`<p class="failure">${row.error || "It does not answer."} Last answer: <${Ago} at=${row.seen} />. Its numbers below are from then.</p>` : null}
    ${data.problems.length ? html`<${Problems} problems=${data.problems} />` : null}
    <div class="stats">
      <${Stat} title="Published" value=${rate(row.published)} hint=${`${bytes(row.published_bytes)}/s`} /><${Stat} title="Delivered" value=${rate(row.delivered)} /><${Stat} title="Depth" value=${count(row.depth)} />
      <${Stat} title="In flight" value=${count(row.in_flight)} /><${Stat} title="Connections" value=${count(row.connections ?? row.clients)} to="/clients" query=${{ filter: node }} />
      <${Stat} title="Memory" value=${bytes(row.memory_bytes)} />
      ${disk ? html`<${Stat} title="Disk free" value=${bytes(row.disk_free)} note=${row.disk_full_in !== null ? `reserve reached in ${duration(row.disk_full_in)}` : ""} hint=${`Publishes stop at ${bytes(row.disk_reserve)}`} />` : null}
    </div>
    <div class="section-head"><h2>Over time</h2><${Ranges} /></div>
    <div class="charts"><${Chart} title="Messages per second" series=${RATES} data=${past} format=${rate} /><${Chart} title="Depth" series=${DEPTH} data=${past} />
      ${disk ? html`<${Chart} title="Disk free" series=${[{ key: "disk_free", title: "free", colour: "grey-series", area: true }]} data=${past} format=${bytes} />` : null}</div>
    <h2>About</h2><div class="panel"><dl class="facts">
      <dt>Address</dt><dd>${node}${row.tcp_port ? html` <span class="quiet">(TCP ${row.tcp_port})</span>` : null}</dd><dt>Version</dt><dd>${row.kind === "nsq" ? `NSQ ${row.version}` : `flintmq, as NSQ ${row.version}`}${row.out_of_date ? html` <${Label} kind="amber">differs from other nodes</${Label}>` : null}</dd>
      <dt>Started</dt><dd>${row.started ? html`${clock(row.started)} (<${Ago} at=${row.started} />)` : "–"}</dd><dt>Health</dt><dd>${row.health || "–"}</dd>
      ${row.unsynced_bytes !== null && row.unsynced_bytes !== undefined ? html`<dt>Not on the device yet</dt><dd>${bytes(row.unsynced_bytes)}</dd>` : null}
      ${row.zone || row.region ? html`<dt>Place</dt><dd>${[row.region, row.zone].filter(Boolean).join(" / ")}</dd>` : null}
      <dt>Known to</dt><dd>${row.lookupds?.length ? row.lookupds.join(", ") : "no nsqlookupd"}</dd></dl></div>
    <h2>Topics on it</h2>
    <${Table} label="topics" rows=${known} name=${(one) => one.topic} columns=${[
      { key: "topic", title: "Topic", main: true, render: (one) => html`<${A} to=${topicPath(one.topic)}>${one.topic}</${A}>${one.paused ? html` <${Label} kind="amber">paused</${Label}>` : null}${one.tombstoned ? html` <${Label} kind="amber">tombstoned</${Label}>` : null}` },
      rated("published", "Published"), counted("depth", "Depth"),
      counted("message_count", "Messages"), counted("channels", "Channels"),
      mayAct("admin") && { key: "tombstone", title: "", num: true, card: false, render: (one) => (one.tombstoned ? null : html`<${Actions} small items=${[{ action: "tombstone_topic_producer", topic: one.topic, node }]} onDone=${reload} />`) },
    ].filter(Boolean)} empty=${html`<p class="quiet">It has no topics.</p>`} /><${Missing} nodes=${data.missing.filter((one) => one !== node)} />`;
}

export function Lookup() {
  useTitle("Lookup");
  const { data, error, reload } = useApi("/lookupds", {}, { every: 5000 });
  const [all, setAll] = useState(false);
  if (error && !data) return html`<${Failure} error=${error} retry=${reload} />`;
  if (!data) return html`<${Loading} />`;
  const inactive = Object.entries(data.inactive).map(([topic, channels]) => ({ topic, channels }));
  const shown = all ? inactive : inactive.slice(0, 100);
  return html`<div class="head"><h1>Lookup</h1></div>
    ${session.get()?.mode === "nsqd" ? html`<${Empty} title="Without nsqlookupd"><p>This nsqadmin was given addresses of nsqd. With --lookupd-http-address it finds nodes by itself.</p></${Empty}>` : html`
    <${Table} label="lookupds" rows=${data.lookupds} name=${(row) => row.address} columns=${[
      { key: "address", title: "nsqlookupd", main: true, render: (row) => html`<${Level} level=${row.up ? 0 : 3} words=${false} /> ${row.address}` },
      { key: "state", title: "State", render: (row) => (row.up ? html`<${Label} kind="green">up</${Label}>` : html`<${Label} kind="red" title=${row.error}>${row.error || "does not answer"}</${Label}>`) },
      { key: "version", title: "Version", render: (row) => row.version || "–" }, counted("nodes", "Nodes"), counted("topics", "Topics")]} />`}
    ${mayAct("operate") ? html`<h2>Create a topic or channel</h2><p class="quiet">A channel created before its consumers misses no message. New nodes of the topic create it too.</p><${CreateForm} onDone=${reload} />` : null}
    <h2>Inactive topics</h2>
    ${inactive.length ? html`<p class="quiet">${inactive.length === 1 ? "One topic" : `${exact(inactive.length)} topics`} that nsqlookupd knows and no node has.</p><${Table} label="inactive topics" rows=${shown} name=${(row) => row.topic} columns=${[
      { key: "topic", title: "Topic", main: true, render: (row) => html`<${A} to=${topicPath(row.topic)}>${row.topic}</${A}>` },
      { key: "channels", title: "Channels", render: (row) => (row.channels.length ? row.channels.map((channel, index) => html`${index ? ", " : ""}<${A} to=${channelPath(row.topic, channel)}>${channel}</${A}>`) : html`<span class="quiet">none</span>`) },
      mayAct("admin") && { key: "delete", title: "", num: true, render: (row) => html`<${Actions} small items=${[{ action: "delete_topic", topic: row.topic }]} onDone=${reload} />` }].filter(Boolean)} />
      ${inactive.length > shown.length ? html`<button onClick=${() => setAll(true)}>Show all ${exact(inactive.length)}</button>` : null}`
      : html`<p class="quiet">None: each topic that nsqlookupd knows is on a node.</p>`}
    ${data.tombstones.length ? html`<h2>Tombstones</h2><${Table} label="tombstones" rows=${data.tombstones} name=${(row) => row.node + row.topic} columns=${[
      { key: "topic", title: "Topic", main: true }, { key: "node", title: "Hidden on", render: (row) => html`<${A} to=${nodePath(row.node)}>${row.node}</${A}>` }]} />` : null}`;
}
