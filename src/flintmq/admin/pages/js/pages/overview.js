// The cluster at a glance: what is wrong first, then totals with their past, one chart, and the topics.
import { html, useApi, useScope, A, count, rate, topicPath } from "../lib.js";
import { Chart, Empty, Failure, FirstPublish, Level, List, Missing, Problems, Ranges, Sparkline, Stat, Label, counted, rated, useHistory, useRange, useTitle } from "../ui.js";

export const RATES = [{ key: "published", title: "published", colour: "accent" }, { key: "delivered", title: "delivered", colour: "blue" }];
export const DEPTH = [{ key: "depth", title: "depth", colour: "grey-series", area: true }];

export function Overview() {
  useTitle("");
  const live = useScope("cluster");
  const { data, error, reload } = useApi("/overview", {}, { every: 20000 });
  const range = useRange();
  const totals = live?.totals || data?.totals;
  const past = useHistory("cluster", "", range, live?.totals && { ...live.totals, at: live.at });
  const problems = live?.problems ? Object.values(live.problems).sort((a, b) => b.level - a.level || b.weight - a.weight) : data?.problems;
  const sparks = data?.sparklines?.series || {};
  const down = live?.nodes ? Object.entries(live.nodes).filter(([, node]) => !node.up).map(([name]) => name) : data?.missing;
  if (error && !totals) return html`<${Failure} error=${error} retry=${reload} />`;
  return html`<h1 class="sr">Overview</h1>
    <section aria-label="Needs attention"><h2 class="first">Needs attention</h2>${problems ? html`<${Problems} problems=${problems} limit=${8} />` : html`<p class="placeholder"></p>`}</section>
    <section aria-label="Totals"><h2>Cluster</h2><${Missing} nodes=${down} />
      <div class="stats">
        <${Stat} title="Published" value=${rate(totals?.published)} values=${sparks.published} />
        <${Stat} title="Delivered" value=${rate(totals?.delivered)} values=${sparks.delivered} colour="blue" />
        <${Stat} title="Depth" value=${count(totals?.depth)} values=${sparks.depth} colour="grey" hint="Messages that wait in topics and channels" />
        <${Stat} title="In flight" value=${count(totals?.in_flight)} values=${sparks.in_flight} colour="grey" />
        <${Stat} title="Requeued" value=${rate(totals?.requeued)} values=${sparks.requeued} colour="grey" />
        <${Stat} title="Timed out" value=${rate(totals?.timed_out)} values=${sparks.timed_out} colour="grey" />
      </div></section>
    <div class="section-head"><h2>Over time</h2><${Ranges} /></div>
    <div class="charts">
      <${Chart} title="Messages per second" series=${RATES} data=${past} format=${rate} />
      <${Chart} title="Depth" series=${DEPTH} data=${past} />
    </div>
    <h2>Topics</h2><${TopicList} limit=${25} />`;
}

const spark = (drawn, row, series, colour) => html`<${Sparkline} values=${drawn[row.topic]?.[series]} colour=${colour} label=${`${series} of ${row.topic}, last hour`} />`;

export function TopicList({ limit = 100 }) {
  const columns = (drawn) => [
    { key: "topic", title: "Topic", main: true, render: (row) => html`${row.trouble ? html`<${Level} level=${row.trouble} words=${false} /> ` : null}<${A} to=${topicPath(row.topic)} title=${row.topic}>${row.topic}</${A}>${row.paused ? html` <${Label} kind="amber">paused</${Label}>` : null}` },
    rated("published", "Published"),
    { key: "spark-published", title: "", sort: null, card: false, spark: true, render: (row) => spark(drawn, row, "published") },
    counted("depth", "Depth"),
    { key: "spark-depth", title: "", sort: null, card: false, spark: true, render: (row) => spark(drawn, row, "depth", "grey") },
    rated("delivered", "Delivered", { card: false }),
    counted("in_flight", "In flight", { card: false }),
    rated("requeued", "Requeued", { card: false }),
    counted("channels", "Channels", { card: false }),
    counted("clients", "Clients", { card: false }),
  ];
  return html`<${List} path="/topics" label="topics" columns=${columns} name=${(row) => row.topic} limit=${limit} sparks=${{ kind: "topic", series: ["published", "depth"] }}
    empty=${html`<${Empty} title="No topics yet"><p>A topic begins with its first message. Publish one:</p>
      <${FirstPublish} topic="greetings" /></${Empty}>`} />`;
}
