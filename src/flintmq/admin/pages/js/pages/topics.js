// The list of topics, and one topic: its numbers, channels, nodes, consumers, readers and settings.
import { html, useApi, useScope, useState, useStore, A, Ago, address, bytes, channelPath, count, go, may, mayAct, nodePath, rate, topicPath } from "../lib.js";
import { Actions, Chart, Command, Crumbs, Empty, Label, Level, Loading, Missing, Problems, Quantiles, Ranges, Stat, Table, Tabs, Unknown, counted, rated, sized, useHistory, useRange, useTitle } from "../ui.js";
import { DEPTH, RATES, TopicList } from "./overview.js";
import { Settings } from "./settings.js";
import { ClientList } from "./clients.js";
import { QueriesOf } from "./pipelines.js";
import { CreateForm, PublishDialog } from "./forms.js";

export function Topics() {
  useTitle("Topics");
  const [creating, setCreating] = useState(false);
  return html`<div class="head"><h1>Topics</h1>${mayAct("operate") ? html`<span class="actions"><button onClick=${() => setCreating(!creating)} aria-expanded=${creating}>Create …</button></span>` : null}</div>
    ${creating ? html`<${CreateForm} onDone=${() => setCreating(false)} />` : null}<${TopicList} />`;
}

export const FLOW = [{ key: "in_flight", title: "in flight", colour: "blue" }, { key: "deferred", title: "deferred", colour: "accent" }];
export const FAILED = [{ key: "requeued", title: "requeued", colour: "accent" }, { key: "timed_out", title: "timed out", colour: "red" }];

/** Name, state, actions and tabs of a topic or channel, on all of their pages. */
export function TopicHead({ topic, channel, paused, current, inactive, onDone }) {
  const [publishing, setPublishing] = useState(false);
  const thing = channel ? "channel" : "topic";
  const items = [
    mayAct("operate") && !inactive && { action: `${paused ? "unpause" : "pause"}_${thing}`, topic, channel },
    mayAct("admin") && !inactive && { action: `empty_${thing}`, topic, channel },
    mayAct("admin") && { action: `delete_${thing}`, topic, channel },
  ];
  const done = (target) => {
    if (target.action.startsWith("delete")) go(channel ? topicPath(topic) : "/topics");
    else onDone?.();
  };
  const path = channel ? channelPath(topic, channel) : topicPath(topic);
  const tabs = [
    ["overview", "Overview", path], ["messages", "Messages", "/messages", { topic, channel }], ["clients", "Clients", path, { tab: "clients" }],
    channel && ["seek", "Time line", path, { tab: "seek" }], ["settings", "Settings", path, { tab: "settings" }],
  ].filter(Boolean);
  return html`<div class="head"><${Crumbs} items=${[["Topics", "/topics"], channel ? [topic, topicPath(topic)] : [topic], channel && [channel]].filter(Boolean)} />
      <h1>${channel || topic}</h1>${paused ? html`<${Label} kind="amber">paused</${Label}>` : null}${inactive ? html`<${Label} kind="amber">on no node</${Label}>` : null}
      <span class="actions">${may("operate") && !inactive ? html`<button class="primary" onClick=${() => setPublishing(true)}>Publish …</button>` : null}<${Actions} items=${items} onDone=${done} /></span></div>
    <${Tabs} label=${thing} items=${tabs} current=${current} />
    ${publishing ? html`<${PublishDialog} topic=${topic} onClose=${() => setPublishing(false)} />` : null}`;
}

export function Topic({ topic }) {
  useTitle(topic);
  const { query } = useStore(address);
  const live = useScope(`topic:${topic}`);
  const { data, error, reload } = useApi(`/topics/${encodeURIComponent(topic)}`, {}, { every: 10000 });
  const range = useRange();
  const row = live?.topic || data?.topic;
  const past = useHistory("topic", topic, range, live?.topic && { ...live.topic, at: live.at });
  if (error && !data) return html`<${Unknown} crumbs=${[["Topics", "/topics"], [topic]]} name=${topic} error=${error} retry=${reload} />`;
  const tab = query.tab || "overview";
  const head = html`<${TopicHead} topic=${topic} paused=${row?.paused} inactive=${data?.inactive} current=${tab} onDone=${reload} />`;
  // These ask for what they show themselves, at the same time.
  if (tab === "settings") return html`${head}<${Settings} topic=${topic} />`;
  if (tab === "clients") return html`${head}<${ClientList} query=${{ topic }} />`;
  if (!data) return html`${head}<${Loading} />`;
  const channels = live?.topic ? Object.entries(live.channels || {}).map(([channel, one]) => ({ topic, ...one, channel })) : data.channels;
  const nodes = data.nodes.map((node) => ({ ...node, ...(live?.nodes?.[node.node] || {}) }));
  return html`${head}<${Missing} nodes=${data.missing} />${data.problems.length ? html`<${Problems} problems=${data.problems} />` : null}
    ${data.inactive ? html`<${Empty} title="No node has this topic"><p>nsqlookupd remembers it, from a node that went away or because it was created there. It comes to life with its first message.</p></${Empty}>` : null}
    <div class="stats">
      <${Stat} title="Published" value=${rate(row.published)} hint=${`${bytes(row.published_bytes)}/s`} /><${Stat} title="Delivered" value=${rate(row.delivered)} />
      <${Stat} title="Depth" value=${count(row.depth)} hint=${`${count(row.topic_depth)} not seen by a channel, ${count(row.backend_depth)} on disk only`} />
      <${Stat} title="On disk only" value=${count(row.backend_depth)} /><${Stat} title="In flight" value=${count(row.in_flight)} /><${Stat} title="Deferred" value=${count(row.deferred)} />
      <${Stat} title="Messages so far" value=${count(row.message_count)} hint=${bytes(row.message_bytes)} />
    </div>
    <div class="section-head"><h2>Channels</h2></div>
    <${ChannelTable} rows=${channels} topic=${topic} nodes=${nodes} />
    <div class="section-head"><h2>Over time</h2><${Ranges} /></div>
    <div class="charts"><${Chart} title="Messages per second" series=${RATES} data=${past} format=${rate} /><${Chart} title="Depth" series=${DEPTH} data=${past} />
      <${Chart} title="In flight and deferred" series=${FLOW} data=${past} /><${Chart} title="Failed deliveries per second" series=${FAILED} data=${past} format=${rate} /></div>
    <${Quantiles} e2e=${data.e2e} />
    <h2>Nodes</h2><${NodePart} rows=${nodes} topic=${topic} onDone=${reload} />
    <${QueriesOf} topic=${topic} />
    ${data.readers?.length ? html`<h2>Readers of the log</h2><${Table} label="readers" name=${(one) => one.reader + one.node} rows=${data.readers} columns=${[
      { key: "reader", title: "Reader", main: true, render: (one) => html`<${A} to="/pipelines" query=${{ topic }}>${one.reader}</${A}>` }, { key: "node", title: "Node", card: false, render: (one) => html`<${A} to=${nodePath(one.node)}>${one.node}</${A}>` },
      counted("lag", "Lag"), sized("bytes", "Held for it"),
      { key: "moved", title: "Moved", num: true, render: (one) => html`<${Ago} at=${one.moved} />` }]} />` : null}`;
}

export function ChannelTable({ rows, topic, nodes }) {
  const { query } = useStore(address);
  const [sort, setSort] = useState("");
  const field = sort.replace(/^-/, "");
  const sorted = [...rows].sort((a, b) => {
    const by = sort ? (a[field] > b[field] ? 1 : a[field] < b[field] ? -1 : 0) * (sort.startsWith("-") ? -1 : 1) : (b.trouble || 0) - (a.trouble || 0) || b.depth - a.depth;
    return by || (a.channel < b.channel ? -1 : 1);
  });
  const shown = query.channels === "all" ? sorted : sorted.slice(0, 200);
  return html`<${Table} label="channels" sort=${sort} onSort=${setSort} rows=${shown} name=${(row) => row.channel} columns=${[
    { key: "channel", title: "Channel", main: true, render: (row) => html`${row.trouble ? html`<${Level} level=${row.trouble} words=${false} /> ` : null}<${A} to=${channelPath(row.topic || topic, row.channel)}>${row.channel}</${A}>${row.paused ? html` <${Label} kind="amber">paused</${Label}>` : null}` },
    counted("clients", "Consumers"),
    counted("depth", "Depth"),
    { key: "growth", title: "Growth", num: true, card: false, hint: "Change of the depth, over the last minute", render: (row) => (row.growth > 0.05 ? `+${rate(row.growth)}` : rate(row.growth)) },
    rated("delivered", "Delivered"),
    counted("in_flight", "In flight"),
    counted("deferred", "Deferred", { card: false }),
    counted("requeue_count", "Requeues", { card: false }),
    counted("timeout_count", "Timeouts", { card: false }),
    { key: "dead_lettered_count", title: "Dead", num: true, card: false, render: (row) => (row.dead_lettered_count ? html`<${A} to="/dead" query=${{ topic: row.topic || topic, channel: row.channel }}>${count(row.dead_lettered_count)}</${A}>` : count(row.dead_lettered_count)) },
  ]} empty=${html`<${Empty} title="No channels yet"><p>A consumer or this command creates one. It gets all messages the topic has kept.</p>
    <${Command}>${nodes.reduce((text, one) => `${text} --nsqd-http-address ${one.node}`, `flintmq channel create ${topic}/CHANNEL`)}</${Command}></${Empty}>`} />`;
}

export function NodePart({ rows, topic, channel, onDone }) {
  const columns = [
    { key: "node", title: "Node", main: true, render: (row) => html`<${A} to=${nodePath(row.node)}>${row.hostname || row.node}</${A}>${row.paused ? html` <${Label} kind="amber">paused</${Label}>` : null}` },
    { key: "address", title: "Address", card: false, render: (row) => row.node },
    counted("depth", "Depth"),
    counted("backend_depth", "On disk only", { card: false }),
    counted("in_flight", "In flight"),
    counted("deferred", "Deferred", { card: false }),
    counted("message_count", "Messages"),
    channel ? counted("clients", "Consumers") : counted("channels", "Channels"),
    !channel && mayAct("admin") && { key: "tombstone", title: "", num: true, card: false, render: (row) => html`<${Actions} small items=${[{ action: "tombstone_topic_producer", topic, node: row.node }]} onDone=${onDone} />` },
  ].filter(Boolean);
  return html`<${Table} label="nodes" rows=${rows} name=${(row) => row.node} columns=${columns} empty=${html`<p class="quiet">On no node.</p>`} />`;
}
