// The live view of the cluster: asked for once a second while it is shown, less often otherwise.

const part = (id) => document.getElementById(id);
const PHASES = ["compute", "stage", "wait", "transfer", "fold", "rest"];
const SHOWN_S = 1, HIDDEN_S = 5;

let headers = () => ({});
let shown = () => false;

export function startCluster(givenHeaders, isShown) {
  headers = givenHeaders;
  shown = isShown;
  part("legend").append(...PHASES.map((name) => element("span", {}, element("i", { className: name }), name)));
  part("show-cluster").addEventListener("click", refresh);
  poll();
}

async function poll() {
  await refresh();
  setTimeout(poll, (shown() ? SHOWN_S : HIDDEN_S) * 1000);
}

async function refresh() {
  try {
    const response = await fetch("cluster", { headers: headers() });
    const found = await response.json();
    if (!response.ok) throw new Error(found.error.message);
    draw(found);
  } catch (error) {
    state(error instanceof TypeError ? "The server does not answer." : error.message, false);
  }
}

function state(text, good) {
  part("dot").className = `dot ${good ? "good" : "bad"}`;
  part("state").className = good ? "" : "bad";
  part("state").textContent = text;
}

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function svg(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

export function bytes(count) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) { count /= 1000; unit++; }
  return `${count >= 100 || !unit ? count.toFixed(0) : count.toFixed(1)} ${units[unit]}`;
}

function draw(found) {
  part("model").textContent = found.model;
  state(found.why_not || `All ${found.world_size} ranks are here.`, !found.why_not);
  const figures = [
    ["tokens/s", found.tokens_per_s.toFixed(1)], ["texts running", found.running], ["texts waiting", found.waiting],
    ["steps/s", found.steps_per_s.toFixed(1)], ["tokens generated", found.generated_tokens.toLocaleString("en")],
    ["cached tokens", found.cached_tokens.toLocaleString("en")],
  ];
  part("figures").replaceChildren(...figures.map(([name, value]) =>
    element("div", { className: "figure" }, element("b", { textContent: value }), element("span", { textContent: name }))));
  if (!shown()) return;
  drawPicture(found);
  part("ranks").replaceChildren(...found.ranks.map((rank) => drawRank(rank, found)));
  part("events").replaceChildren(...found.events.slice().reverse().map(({ at, text }) => element("li", {},
    element("time", { textContent: new Date(at * 1000).toLocaleTimeString() }), text)));
}

// Where ranks stand: two side by side, more on an ellipse, the first at the top. Returns places and the picture's height.
function ring(n, width, reach) {
  const first = n > 2 ? -Math.PI / 2 : Math.PI, angles = Array.from({ length: n }, (_, rank) => first + (2 * Math.PI * rank) / n);
  const heights = angles.map((angle) => (n > 2 ? 120 * Math.sin(angle) : 0));
  const top = Math.min(...heights) - 48, places = angles.map((angle, i) => [width / 2 + reach * Math.cos(angle), heights[i] - top]);
  return [places, Math.max(...heights) - top + 48];
}

function drawPicture(found) {
  const n = found.world_size, narrow = part("cluster").clientWidth < 500, picture = part("picture");
  const width = narrow ? 380 : 640, reach = narrow ? 130 : 190, [places, height] = ring(n, width, reach);
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const place = (rank) => places[rank];
  const lines = [], labels = [];
  for (let a = 0; a < n; a++) {
    for (let b = a + 1; b < n; b++) {
      const rate = (found.ranks[a]?.sent_per_s[b] || 0) + (found.ranks[b]?.sent_per_s[a] || 0);
      const known = found.ranks[a]?.sent_per_s[b] !== undefined || found.ranks[b]?.sent_per_s[a] !== undefined;
      if (!known) continue;  // these two have no link
      const [x1, y1] = place(a), [x2, y2] = place(b);
      lines.push(svg("line", { x1, y1, x2, y2 }));
      labels.push(svg("text", { x: (x1 + x2) / 2, y: (y1 + y2) / 2 - 14, class: "soft" }, `${bytes(rate)}/s`));
    }
  }
  const nodes = Array.from({ length: n }, (_, rank) => {
    const [x, y] = place(rank), about = found.ranks[rank], lost = found.lost.includes(rank);
    const group = svg("g", {});
    group.append(svg("circle", { cx: x, cy: y, r: 42, class: `node ${lost ? "lost" : ""}` }),
      svg("text", { x, y: y - 6 }, `rank ${rank}`), svg("text", { x, y: y + 10, class: "soft" }, lost ? "lost" : about?.device || ""),
      svg("text", { x, y: y + 24, class: "soft" }, lost ? "" : about?.dtype || ""));
    return group;
  });
  picture.replaceChildren(...lines, ...labels, ...nodes);
}

function drawRank(rank, found) {
  const lost = found.lost.includes(rank.rank);
  const bar = element("div", { className: "bar", title: PHASES.map((name) => `${name} ${percent(rank.of_time[name])}`).join(", ") },
    ...PHASES.map((name) => {
      const slice = element("i", { className: name });
      slice.style.width = `${100 * (rank.of_time[name] || 0)}%`;
      return slice;
    }));
  const facts = [`${rank.device} on ${rank.host}`, rank.dtype, `${percent(rank.share)} of the weights, ${bytes(rank.bytes_held)}`,
    `KV ${bytes(rank.kv_bytes)}`];
  if (rank.waits_for !== null) facts.push(`waits most for rank ${rank.waits_for}`);
  return element("div", { className: `rank ${lost ? "lost" : ""}` },
    element("div", { className: "about" }, element("b", { textContent: `rank ${rank.rank}${lost ? ": lost" : ""}` }),
      ...facts.map((text) => element("span", { textContent: text }))), bar);
}

function percent(part) {
  return `${(100 * (part || 0)).toFixed(0)} %`;
}
