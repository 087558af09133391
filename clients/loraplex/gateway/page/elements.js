// Builds elements. Names in them are tenants' data, so they are set as text, never parsed as HTML.

export const byId = (id) => document.getElementById(id);

/** Return an element with attributes and children; a child that is no node becomes text. */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

/** Show a table in the container `id`, labelled by its heading; names align left. Without rows it shows `none`. */
export function showTable(id, heading, columns, rows, none) {
  const container = byId(id);
  if (!rows.length) {
    container.replaceChildren(element("p", { class: "dim" }, none));
    return;
  }
  const cells = (row) => row.map((cell, at) => element("td", columns[at].name ? { class: "name" } : {}, cell));
  const body = element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells(row))));
  const table = container.querySelector("table");
  if (table) { // only rows that change, so that the table stays scrolled and focused, and what is selected in it
    if (!table.tBodies[0].isEqualNode(body)) table.tBodies[0].replaceWith(body);
    return;
  }
  const heads = columns.map(({ title, name }) => element("th", { scope: "col", ...(name && { class: "name" }) }, title));
  const head = element("thead", {}, element("tr", {}, ...heads));
  const scroll = { class: "scroll", role: "region", tabindex: "0", "aria-labelledby": heading };
  container.replaceChildren(element("div", scroll, element("table", {}, head, body)));
}

/** Return a bar of `part` of `whole`, with `text` beside it. */
export function bar(part, whole, label, text) {
  const meter = element("meter", { min: 0, max: Math.max(1, whole), value: part, "aria-label": label });
  return element("span", {}, meter, text);
}

/** Return a line through values, in order of time; empty where there are fewer than two. */
export function sparkline(values, label) {
  const most = Math.max(...values, 1e-9);
  const points = values.map((value, at) => `${at},${(29 - (27 * value) / most).toFixed(1)}`);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const shape = { viewBox: `0 0 ${Math.max(1, values.length - 1)} 30`, preserveAspectRatio: "none", role: "img" };
  for (const [name, value] of Object.entries({ ...shape, "aria-label": label })) svg.setAttribute(name, value);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", values.length > 1 ? points.join(" ") : "");
  svg.append(line);
  return svg;
}
