// The page of `rdmux node --web`: asks for a snapshot each second, and shows what has changed since the one before. Names come from
// applications, so they are only ever put into the page as text.
'use strict';

const PERIOD_MS = 1000;
/** Samples in a chart. */
const SAMPLES = 120;
/** Parts of a chart with a colour of their own; the others are one. */
const PARTS = 7;
/** Rows of a table. */
const ROWS = 100;
/** Name of those that are one in a chart. */
const OTHERS = 'others';

const $ = (id) => document.getElementById(id);
let token = '';
/** The snapshot before. */
let before = null;
/** What was measured between two snapshots: seconds since the first one, rates of the parts, latencies, Jain index. */
const samples = [];
/** Colour of each part, by its name. */
const colours = new Map();

// --- what a token is for

function begin() {
  const given = location.hash.slice(1);
  if (given) {
    sessionStorage.setItem('token', given);
    // It is not to stay in the history.
    history.replaceState(null, '', location.pathname);
  }
  token = sessionStorage.getItem('token') || '';
  $('ask').addEventListener('submit', (event) => {
    event.preventDefault();
    // The whole URL does as well.
    token = $('token').value.trim().replace(/^.*#/, '');
    sessionStorage.setItem('token', token);
    next();
  });
  next();
}

function ask(text) {
  sessionStorage.removeItem('token');
  token = '';
  before = null;
  samples.length = 0;
  $('view').hidden = true;
  $('ask').hidden = false;
  say(text);
}

function say(text) {
  if ($('status').textContent !== text) $('status').textContent = text;
}

async function next() {
  if (!token) return ask('Give the token');
  let wait = PERIOD_MS;
  try {
    const answer = await fetch('snapshot.json', {
      headers: { Authorization: 'Bearer ' + token }, cache: 'no-store', signal: AbortSignal.timeout(5000),
    });
    if (answer.status === 401) return ask('This is not the token of this node');
    if (!answer.ok) throw new Error((await answer.text()).trim());
    show(await answer.json());
  } catch (error) {
    say('No answer from the node: ' + error.message);
    before = null;
    wait = 2 * PERIOD_MS;
  }
  setTimeout(next, wait);
}

// --- from snapshots to rates

const byId = (items, key) => new Map(items.map((item) => [key(item), item]));

/** Returns what was moved since, per second; of something new, since it began. */
function rates(counts, earlier, seconds) {
  const zero = { requests: 0, bytes: 0, errors: 0, receives: 0, received_bytes: 0, latency: { buckets: [] } };
  const old = earlier || zero;
  const rate = (key) => Math.max(0, counts[key] - old[key]) / seconds;
  return {
    requests: rate('requests'), bytes: rate('bytes'), receives: rate('receives'), received_bytes: rate('received_bytes'),
    errors: counts.errors, waiting: counts.waiting_requests,
    buckets: counts.latency.buckets.map((count, at) => Math.max(0, count - (old.latency.buckets[at] || 0))),
  };
}

/** Returns the time in ns below which a part of the requests is; bucket i ends at 256 << i ns. */
function quantile(buckets, part) {
  const all = buckets.reduce((sum, count) => sum + count, 0);
  if (!all) return null;
  let left = part * all;
  for (let at = 0; at < buckets.length; at++) {
    if (left <= buckets[at]) {
      const end = 256 * 2 ** at;
      return end / 2 + (end / 2) * (left / buckets[at]);
    }
    left -= buckets[at];
  }
  return 256 * 2 ** (buckets.length - 1);
}

/** Returns the Jain index: 1 if all have the same, 1/n if one has all. */
function jain(values) {
  const sum = values.reduce((a, b) => a + b, 0);
  const squares = values.reduce((a, b) => a + b * b, 0);
  return squares ? sum * sum / (values.length * squares) : null;
}

function show(snapshot) {
  $('ask').hidden = true;
  $('view').hidden = false;
  $('address').textContent = snapshot.node.address;
  document.title = 'rdmux node ' + snapshot.node.address;
  // Two pages share a snapshot that is not older than theirs.
  if (before && before.node.time_ns === snapshot.node.time_ns) return;
  const seconds = before ? (snapshot.node.time_ns - before.node.time_ns) / 1e9 : 0;
  if (seconds > 0) {
    const since = (key, of) => {
      const old = byId(before[key], of);
      return snapshot[key].map((item) => ({ ...item, rates: rates(item.counts, (old.get(of(item)) || {}).counts, seconds) }));
    };
    const tenants = since('tenants', (item) => item.name);
    const applications = since('applications', (item) => item.id);
    const connections = since('connections', (item) => item.application + '/' + item.qpn);
    // Where one tenant alone has applications, they are what shares the device.
    const few = tenants.filter((item) => item.applications).length < 2;
    const parts = few ? applications.map((item) => ({ ...item, label: item.name + ' ' + (item.pid ?? '#' + item.id) }))
      : tenants.map((item) => ({ ...item, label: item.name }));
    const sending = parts.filter((item) => item.rates.bytes > 0 || item.rates.waiting > 0);
    const buckets = [];
    for (const item of tenants) item.rates.buckets.forEach((count, at) => { buckets[at] = (buckets[at] || 0) + count; });
    samples.push({
      time: snapshot.node.time_ns / 1e9, parts: new Map(parts.map((item) => [item.label, item.rates.bytes])), buckets,
      p50: quantile(buckets, 0.5), p99: quantile(buckets, 0.99), jain: jain(sending.map((item) => item.rates.bytes)),
    });
    if (samples.length > SAMPLES) samples.shift();
    $('of').textContent = few ? 'applications' : 'tenants';
    chartShare();
    chartLatency();
    tables(snapshot, tenants, applications, connections);
    const node = snapshot.node;
    say(`${node.provider}, ${node.waiting}, ${snapshot.applications.length} applications, `
      + `${node.retransmitted_packets} packets retransmitted`);
  } else {
    say('Waiting for the second snapshot');
  }
  before = snapshot;
}

// --- text

const UNITS = ['', 'k', 'M', 'G', 'T'];
function withUnit(value, base = 1) {
  let unit = 0;
  value *= base;
  while (value >= 1000 && unit + 1 < UNITS.length) { value /= 1000; unit++; }
  return (value >= 100 || value === 0 ? value.toFixed(0) : value.toFixed(value >= 10 ? 1 : 2)) + ' ' + UNITS[unit];
}
const bits = (bytes) => withUnit(bytes, 8) + 'bit/s';
function time(ns) {
  if (ns === null) return '–';
  const [value, unit] = ns < 1e3 ? [ns, 'ns'] : ns < 1e6 ? [ns / 1e3, 'µs'] : ns < 1e9 ? [ns / 1e6, 'ms'] : [ns / 1e9, 's'];
  return value.toPrecision(3) + ' ' + unit;
}

// --- charts

const SVG = 'http://www.w3.org/2000/svg';
function draw(into, name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  into.append(element);
  return element;
}

/** Empties a chart; returns its size, and the place of a sample: the latest is at the right end. */
function frame(svg) {
  const box = svg.getBoundingClientRect();
  const [width, height, left, bottom] = [Math.max(200, box.width), Math.max(100, box.height), 74, 16];
  svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
  svg.replaceChildren();
  const step = (width - left) / (SAMPLES - 1);
  const x = (at) => width - (samples.length - 1 - at) * step;
  return { width, height: height - bottom, left, x, step };
}

function scale(svg, place, y, text) {
  draw(svg, 'line', { class: 'grid', x1: place.left, x2: place.width, y1: y, y2: y });
  draw(svg, 'text', { x: place.left - 6, y: y + 4, 'text-anchor': 'end' }, text);
}

function axis(svg, place) {
  const seconds = samples.length > 1 ? samples.at(-1).time - samples[0].time : 0;
  draw(svg, 'text', { x: place.width, y: place.height + 13, 'text-anchor': 'end' }, 'now');
  // Only where it does not cover the other one.
  if (place.width - place.x(0) > 90) {
    draw(svg, 'text', { x: Math.max(place.left, place.x(0)), y: place.height + 13 }, `${seconds.toFixed(0)} s ago`);
  }
}

/** Returns the parts of all samples, those with most first; from some on they are one. */
function leading() {
  const sums = new Map();
  for (const sample of samples) for (const [name, rate] of sample.parts) sums.set(name, (sums.get(name) || 0) + rate);
  const names = [...sums.keys()].filter((name) => sums.get(name) > 0).sort((a, b) => sums.get(b) - sums.get(a));
  const shown = names.slice(0, PARTS);
  // A part keeps its colour as long as it is shown.
  for (const name of colours.keys()) if (!shown.includes(name)) colours.delete(name);
  for (const name of shown) {
    if (colours.has(name)) continue;
    const used = new Set(colours.values());
    colours.set(name, [...Array(PARTS).keys()].find((colour) => !used.has(colour)));
  }
  const layers = shown.map((name) => ({ name, colour: colours.get(name), of: (sample) => sample.parts.get(name) || 0 }));
  if (names.length > PARTS) {
    const rest = names.slice(PARTS);
    layers.push({ name: OTHERS, colour: PARTS, of: (sample) => rest.reduce((sum, name) => sum + (sample.parts.get(name) || 0), 0) });
  }
  return layers;
}

function chartShare() {
  const svg = $('share');
  const place = frame(svg);
  const layers = leading();
  const totals = samples.map((sample) => layers.reduce((sum, layer) => sum + layer.of(sample), 0));
  const most = Math.max(...totals, 1);
  const y = (rate) => place.height - (place.height - 8) * rate / most;
  for (const part of [0, 0.5, 1]) scale(svg, place, y(part * most), bits(part * most));
  const below = samples.map(() => 0);
  for (const layer of layers) {
    const lower = below.map((rate, at) => `${place.x(at)},${y(rate)}`).reverse();
    samples.forEach((sample, at) => { below[at] += layer.of(sample); });
    const upper = below.map((rate, at) => `${place.x(at)},${y(rate)}`);
    const area = draw(svg, 'polygon', { class: 'c' + layer.colour, points: [...upper, ...lower].join(' '), 'data-rate': layer.of(samples.at(-1)) });
    draw(area, 'title', {}, layer.name);
  }
  axis(svg, place);
  const now = samples.at(-1);
  const text = now.jain === null ? 'nobody sends' : `${bits(totals.at(-1))}, Jain index ${now.jain.toFixed(3)}`;
  $('share-text').textContent = text;
  $('legend').replaceChildren(...layers.map((layer) => {
    const item = document.createElement('li');
    const swatch = document.createElement('i');
    swatch.className = 'c' + layer.colour;
    item.append(swatch, `${layer.name} ${bits(layer.of(now))}`);
    return item;
  }));
}

function chartLatency() {
  const svg = $('latency');
  const place = frame(svg);
  const used = samples.flatMap((sample) => [...sample.buckets.keys()].filter((at) => sample.buckets[at] > 0));
  const now = samples.at(-1);
  $('latency-text').textContent = now.p50 === null ? 'no request completes' : `p50 ${time(now.p50)}, p99 ${time(now.p99)}`;
  axis(svg, place);
  if (!used.length) return;
  const [low, high] = [Math.min(...used), Math.max(...used) + 1];
  // By the logarithm: a bucket is as high as any other.
  const y = (bucket) => place.height - (place.height - 8) * (bucket - low) / (high - low);
  const bucketOf = (ns) => Math.log2(ns / 128);
  for (let at = low; at <= high; at += Math.max(1, Math.ceil((high - low) / 6))) scale(svg, place, y(at), time(128 * 2 ** at));
  samples.forEach((sample, at) => {
    const most = Math.max(...sample.buckets, 1);
    sample.buckets.forEach((count, bucket) => {
      if (!count) return;
      const height = y(bucket) - y(bucket + 1);
      draw(svg, 'rect', {
        class: 'heat', x: place.x(at) - place.step, y: y(bucket + 1), width: place.step, height, opacity: 0.08 + 0.5 * count / most,
      });
    });
  });
  for (const part of ['p50', 'p99']) {
    const points = samples.map((sample, at) => [at, sample[part]]).filter(([, ns]) => ns !== null);
    const line = points.map(([at, ns]) => `${place.x(at) - place.step / 2},${y(bucketOf(ns))}`).join(' ');
    draw(svg, 'polyline', { class: 'line ' + part, points: line, 'data-ns': now[part] ?? '' });
  }
}

// --- tables

/** Fills a table. A column is a title, a function of the row, and `word` if it is no number. */
function fill(id, columns, rows) {
  const line = (kind, texts) => {
    const row = document.createElement('tr');
    texts.forEach((text, at) => {
      const cell = document.createElement(kind);
      cell.textContent = text;
      if (kind === 'th') cell.scope = 'col';
      if (columns[at][2]) cell.className = columns[at][2];
      row.append(cell);
    });
    return row;
  };
  const head = document.createElement('thead');
  head.append(line('th', columns.map((column) => column[0])));
  const body = document.createElement('tbody');
  body.append(...rows.slice(0, ROWS).map((row) => line('td', columns.map((column) => column[1](row)))));
  $(id).replaceChildren(head, body);
}

function tables(snapshot, tenants, applications, connections) {
  const total = tenants.reduce((sum, item) => sum + item.rates.bytes, 0);
  const moved = [
    ['rate', (row) => bits(row.rates.bytes)],
    ['share', (row) => total ? (100 * row.rates.bytes / total).toFixed(1) + ' %' : '–'],
    ['requests/s', (row) => withUnit(row.rates.requests)],
    ['received', (row) => bits(row.rates.received_bytes)],
    ['p50', (row) => time(quantile(row.rates.buckets, 0.5))],
    ['p99', (row) => time(quantile(row.rates.buckets, 0.99))],
    ['depth', (row) => row.rates.waiting],
    ['errors', (row) => row.rates.errors],
  ];
  const busiest = (rows) => [...rows].sort((a, b) => b.rates.bytes - a.rates.bytes);
  fill('tenants', [['tenant', (row) => row.name, 'word'], ['applications', (row) => row.applications], ...moved], busiest(tenants));
  fill('applications', [
    ['application', (row) => row.name, 'word'], ['pid', (row) => row.pid ?? '–'], ['uid', (row) => row.uid ?? '–'],
    ['tenant', (row) => row.tenant, 'word'], ['queue pairs', (row) => row.queue_pairs], ...moved,
  ], busiest(applications));
  const names = new Map(snapshot.applications.map((item) => [item.id, item.name]));
  fill('connections', [
    ['application', (row) => names.get(row.application) ?? row.application, 'word'], ['QPN', (row) => row.qpn],
    ['peer', (row) => row.peer ?? '–', 'word'], ['class', (row) => row.class ?? '–'],
    ['route', (row) => row.shared_qp === null ? row.route : `${row.route} ${row.shared_qp}`, 'word'], ...moved,
  ], busiest(connections));
  const hidden = Math.max(0, connections.length - ROWS) + snapshot.connections_left_out;
  $('left-out').textContent = hidden ? `and ${hidden} more` : '';
  fill('shared', [
    ['number', (row) => row.id], ['peer', (row) => row.peer, 'word'], ['tenant', (row) => row.tenant, 'word'],
    ["peer's tenant", (row) => row.peer_tenant, 'word'], ['class', (row) => row.class], ['connections', (row) => row.connections],
    ['window', (row) => withUnit(row.window_bytes) + 'B'], ['in flight', (row) => withUnit(row.in_flight_bytes) + 'B'],
  ], snapshot.shared_qps);
}

begin();
