// Elements of the page.  Text is always set as text, so that no name in a graph is taken for markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, v] of Object.entries(value)) element.style.setProperty(name, v);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

const el = (tag, properties = {}, ...children) => fill(document.createElement(tag), properties, children);
const svg = (tag, properties = {}, ...children) => fill(document.createElementNS(SVG, tag), properties, children);
const byId = (id) => document.getElementById(id);

/** A button that reads as a link in running text. */
const link = (text, onclick) => el("button", { type: "button", class: "link", onclick }, text);

/** The sample of a layout: its colour and hatch. */
const swatch = (kind) => el("span", { class: `swatch ${kind}`, "aria-hidden": "true" });

/** Two columns of words and what they stand for. */
const facts = (pairs) => el("dl", {}, pairs.filter(Boolean).map(([term, ...what]) => [el("dt", {}, term), el("dd", {}, ...what)]));
