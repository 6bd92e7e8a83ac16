// One channel: its numbers, its part on each node, consumers, settings, and its place on the log's time line.
import { html, useApi, useScope, useStore, A, address, count, exact, rate } from "../lib.js";
import { Chart, Loading, Missing, Problems, Quantiles, Ranges, Stat, Unknown, useHistory, useRange, useTitle } from "../ui.js";
import { DEPTH } from "./overview.js";
import { FAILED, FLOW, NodePart, TopicHead } from "./topics.js";
import { Settings } from "./settings.js";
import { ClientList } from "./clients.js";
import { TimeLine } from "./seek.js";

const HANDED = [{ key: "handed", title: "arrived", colour: "accent" }, { key: "delivered", title: "delivered", colour: "blue" }];

export function Channel({ topic, channel }) {
  useTitle(`${topic}/${channel}`);
  const { query } = useStore(address);
  const live = useScope(`channel:${topic}/${channel}`);
  const { data, error, reload } = useApi(`/topics/${encodeURIComponent(topic)}/${encodeURIComponent(channel)}`, {}, { every: 10000 });
  const range = useRange();
  const past = useHistory("channel", `${topic}/${channel}`, range, live?.channel && { ...live.channel, at: live.at });
  if (error && !data) return html`<${Unknown} crumbs=${[["Topics", "/topics"], [topic, `/topics/${encodeURIComponent(topic)}`], [channel]]} name=${channel} error=${error} retry=${reload} />`;
  const row = live?.channel || data?.channel;
  const tab = query.tab || "overview";
  const head = html`<${TopicHead} topic=${topic} channel=${channel} paused=${row?.paused} current=${tab} onDone=${reload} />`;
  if (tab === "settings") return html`${head}<${Settings} topic=${topic} channel=${channel} />`;
  if (tab === "clients") return html`${head}<${ClientList} query=${{ topic, channel }} />`;
  if (tab === "seek") return html`${head}<${TimeLine} topic=${topic} channel=${channel} />`;
  if (!data) return html`${head}<${Loading} />`;
  const nodes = data.nodes.map((node) => ({ ...node, ...(live?.nodes?.[node.node] || {}) }));
  const busy = row.depth > 0 && data.ready > 0 && row.in_flight >= data.ready;
  return html`${head}<${Missing} nodes=${data.missing} />${data.problems.length ? html`<${Problems} problems=${data.problems} />` : null}
    <div class="stats">
      <${Stat} title="Depth" value=${count(row.depth)} hint=${`${exact(row.backend_depth)} on disk only`} to="/messages" query=${{ topic, channel }} />
      <${Stat} title="Arrived" value=${rate(row.handed)} /><${Stat} title="Delivered" value=${rate(row.delivered)} />
      <${Stat} title="In flight / RDY" value=${`${count(row.in_flight)} / ${count(data.ready)}`} note=${busy ? "consumers are busy" : ""} hint="Messages that consumers hold, and how many they are ready for" />
      <${Stat} title="Deferred" value=${count(row.deferred)} /><${Stat} title="Consumers" value=${count(row.clients)} />
      <${Stat} title="Requeues" value=${count(row.requeue_count)} /><${Stat} title="Timeouts" value=${count(row.timeout_count)} />
      <${Stat} title="Dead letters" value=${count(row.dead_lettered_count)} to="/dead" query=${{ topic, channel }} />
    </div>
    ${data.dead_letter_topic && row.dead_lettered_count ? html`<p class="quiet">Dead letters are in <${A} to=${`/topics/${encodeURIComponent(data.dead_letter_topic)}`}>${data.dead_letter_topic}</${A}>.</p>` : null}
    <div class="section-head"><h2>Over time</h2><${Ranges} most="1h" /></div>
    <div class="charts"><${Chart} title="Messages per second" series=${HANDED} data=${past} format=${rate} /><${Chart} title="Depth" series=${DEPTH} data=${past} />
      <${Chart} title="In flight and deferred" series=${FLOW} data=${past} /><${Chart} title="Failed deliveries per second" series=${FAILED} data=${past} format=${rate} /></div>
    <${Quantiles} e2e=${data.e2e} />
    <h2>Nodes</h2><${NodePart} rows=${nodes} topic=${topic} channel=${channel} onDone=${reload} />`;
}
