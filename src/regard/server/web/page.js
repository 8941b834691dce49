"use strict";

// Texts are never parsed as HTML: the code creates every element and sets its textContent.

const KNOWN = JSON.parse(document.getElementById("known").textContent);
const SHADES = 64; // the shades in /colours.css
const MIN_SHOWN = 0.005; // smaller weights round to 0.00 and are not listed
const MAX_CELLS = 4096; // cells of a table; larger tables are shown as pictures

// ------------------------------------------------------------------------------------- elements

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

function shade(element, value, most) {
  const step = most > 0 ? Math.min(Math.max(value / most, 0), 1) : 0;
  const number = Math.round(step * (SHADES - 1));
  element.style.setProperty("--shade", `var(--s${number})`);
  element.style.setProperty("--on", `var(--o${number})`);
  return element;
}

function share(element, value) {
  element.style.setProperty("--share", value);
  return element;
}

/** Formats a weight with two decimals, as in terminal pictures: .94, 1.00, and . for 0. */
function brief(value) {
  if (value == null) return "";
  const text = value.toFixed(2);
  return text === "0.00" ? "." : text.replace(/^0/, "");
}

const most = (rows) => rows.flat().reduce((a, b) => Math.max(a, b ?? 0), 0);
const named = (text) => make("p", { class: "name" }, text);
const facts = (...parts) => make("p", { class: "facts" }, parts.filter(Boolean).join(" · "));
const seconds = (value) => `${value < 10 ? value.toFixed(2) : Math.round(value)} s`;
const counted = (count, name) => `${count.toLocaleString("en")} ${name}${count === 1 ? "" : "s"}`;

// ------------------------------------------------------------------------------ words in a text

/** The ranges of units (words or sentences) in a text, in order; null if a unit is missing.
    Blank space is ignored: no other characters lie between the units. */
function placesOf(text, units) {
  const bare = (unit) => unit.replace(/\s+/g, "");
  const at = [];
  for (let i = 0; i < text.length; i++) if (!/\s/.test(text[i])) at.push(i);
  let next = bare(text).indexOf(bare(units.join("")));
  if (next < 0 || !units.length) return null;
  return units.map((unit) => {
    const first = next;
    next += bare(unit).length;
    return [at[first], at[next - 1] + 1];
  });
}

/** A function from the position of a character in a text, as records count, to that in UTF-16 code
    units, as JavaScript counts. */
function positionsOf(text) {
  const positions = [0];
  for (const character of text) positions.push(positions.at(-1) + character.length);
  return (position) => positions[position];
}

/** An element for a text, with a span for each unit. `marked` is a range to underline. The text
    before position `quiet` is grey. `places` are the ranges of the units, if they are known. */
function textOf(text, units = [], { marked = null, quiet = 0, places = placesOf(text, units) } = {}) {
  const long = text.length > 240;
  const element = make("p", { class: long ? "text long" : "text", dir: "auto" });
  const spans = units.map((unit) => make("span", { class: "unit" }, unit));
  if (!places || !units.length) {
    element.append(...(units.length ? spans.flatMap((span) => [span, " "]) : [text]));
    return { element, spans };
  }
  const pieces = []; // [text or span, start, end]
  let done = 0;
  places.forEach(([start, end], index) => {
    if (start > done) pieces.push([text.slice(done, start), done, start]);
    spans[index].textContent = text.slice(start, end);
    if (end <= quiet) spans[index].classList.add("prompt");
    pieces.push([spans[index], start, end]);
    done = end;
  });
  pieces.push([text.slice(done), done, text.length]);
  const [first, last] = marked ?? [0, 0];
  const mark = make("mark");
  for (const [piece, start, end] of pieces) {
    // Blank space at the edges of the marked range is not underlined.
    const blank = typeof piece === "string";
    const inside = blank ? start >= first && end <= last : start < last && end > first;
    if (inside && !mark.parentNode) element.append(mark);
    (inside ? mark : element).append(piece);
  }
  return { element, spans };
}

/** An element that shows each token in a box. */
function chipsOf(tokens) {
  const spans = tokens.map((token) => make("span", { class: "unit" }, token));
  return { element: make("p", { class: "chips" }, ...spans), spans };
}

/** Scrolls a long text to an element without scrolling the page. */
function reveal(element) {
  const pane = element?.closest(".pane.long");
  if (!pane) return;
  const [inner, outer] = [element.getBoundingClientRect(), pane.getBoundingClientRect()];
  if (inner.top >= outer.top && inner.bottom <= outer.bottom) return;
  pane.scrollTop += (inner.top + inner.bottom - outer.top - outer.bottom) / 2;
}

// ------------------------------------------------------------------------------ linked texts

/** Makes units interactive: pointing at a unit highlights and lists the units it attended to.
    `queries` and `keys` are lists of spans with `names`, `weights` is [queries][keys]. */
function linked({ queries, keys, names, weights, label, hint, table = null, both = true }) {
  const status = make("p", { class: "attended", role: "status" }, hint);
  const column = (j) => weights.map((row) => row[j]);
  const all = new Set([...queries, ...keys]);
  let pinned = null;

  function clear() {
    for (const span of all) {
      span.classList.remove("lit", "here");
      if (span.hasAttribute("aria-pressed")) span.setAttribute("aria-pressed", "false");
    }
    table?.here(null);
  }

  function show(choice) {
    clear();
    if (!choice) return status.replaceChildren(hint);
    const { index, back } = choice;
    const row = back ? column(index) : weights[index];
    const others = back ? queries : keys;
    const otherNames = back ? names.queries : names.keys;
    const top = Math.max(...row, 0);
    row.forEach((weight, j) => {
      if (weight > 0.05 * top && top >= MIN_SHOWN) {
        others[j].classList.add("lit");
        shade(others[j], weight, top);
      }
    });
    const here = (back ? keys : queries)[index];
    here.classList.add("here");
    if (choice === pinned) here.setAttribute("aria-pressed", "true");
    if (!back) table?.here(index);
    const best = row.map((_, j) => j).sort((a, b) => row[b] - row[a]).slice(0, 3);
    reveal(others[best[0]]);
    const top3 = best.filter((j) => row[j] >= MIN_SHOWN).map((j) => make("span", { class: "key" },
      make("span", {}, otherNames[j]), share(make("i", { "aria-hidden": "true" }), row[j] / top),
      make("span", { class: "number" }, row[j].toFixed(2))));
    status.replaceChildren(
      make("span", {}, make("b", {}, (back ? names.keys : names.queries)[index]),
        back ? " was attended to by" : " attended to"),
      ...(top3.length ? top3 : ["nothing much"]));
  }

  function makePointable(spans, back) {
    spans.forEach((span, index) => {
      const choice = { index, back };
      span.tabIndex = index ? -1 : 0;
      span.setAttribute("role", "button");
      span.setAttribute("aria-pressed", "false");
      for (const name of ["mouseenter", "focus"]) span.addEventListener(name, () => show(choice));
      for (const name of ["mouseleave", "blur"]) span.addEventListener(name, () => show(pinned));
      const pin = () => {
        pinned = pinned?.index === index && pinned.back === back ? null : choice;
        show(pinned ?? choice);
      };
      span.addEventListener("click", pin);
      span.addEventListener("keydown", (event) => {
        const last = spans.length - 1;
        const to = { ArrowRight: Math.min(index + 1, last), ArrowLeft: Math.max(index - 1, 0),
          Home: 0, End: last }[event.key];
        if (to !== undefined) {
          span.tabIndex = -1;
          spans[to].tabIndex = 0;
          spans[to].focus();
        } else if (event.key === "Enter" || event.key === " ") pin();
        else if (event.key === "Escape") show((pinned = null));
        else return;
        event.preventDefault();
      });
    });
    spans[0]?.parentElement.closest("p")?.setAttribute("role", "group");
    spans[0]?.parentElement.closest("p")?.setAttribute("aria-label", label[back ? 1 : 0]);
  }

  makePointable(queries, false);
  if (both) makePointable(keys, true);
  table?.point((index) => show(index === null ? pinned : { index, back: false }));
  return status;
}

/** A table with an empty corner, a cell in `heads` for each column, and `rows`. */
function tableOf(attributes, heads, rows, caption = null) {
  return make("table", attributes, caption,
    make("thead", {}, make("tr", {}, make("td"), ...heads)), make("tbody", {}, ...rows));
}

/** A coloured table of weights. With `out`, the first column has no colour. */
function weightTable(queries, keys, weights, { mark = false, out = false } = {}) {
  const top = most(out ? weights.map((row) => row.slice(1)) : weights);
  const tall = keys.length > 12 || keys.some((key) => key.length > 8);
  const short = (name) => (name.length > 40 ? `${name.slice(0, 39)}…` : name);

  function cellOf(weight, i, j, best) {
    const title = `${queries[i]} → ${keys[j]}: ${weight.toPrecision(3)}`;
    if (out && j === 0) return make("td", { class: "out", title }, brief(weight));
    const marked = mark && j === best && weight > 0;
    return shade(make("td", { class: marked ? "best" : null, title }, brief(weight)), weight, top);
  }

  const rows = weights.map((row, i) => {
    const best = row.indexOf(Math.max(...row));
    const name = make("th", { scope: "row", title: queries[i] }, short(queries[i]));
    return make("tr", {}, name, ...row.map((weight, j) => cellOf(weight, i, j, best)));
  });
  const kind = tall ? "tall" : null;
  const heads = keys.map((key) =>
    make("th", { scope: "col", class: kind, title: key }, make("span", {}, short(key))));
  const ramp = Array.from({ length: 16 }, (_, i) => shade(make("b"), i, 15));
  const element = make("div", {},
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Weights" },
      tableOf({ class: "map" }, heads, rows)),
    make("div", { class: "scale" }, "0", make("i", { "aria-hidden": "true" }, ...ramp),
      `${Number(top.toPrecision(3))} weight`));
  return {
    element,
    here: (index) => rows.forEach((row, i) => row.classList.toggle("here", i === index)),
    point: (tell) => rows.forEach((row, i) => {
      row.addEventListener("mouseenter", () => tell(i));
      row.addEventListener("mouseleave", () => tell(null));
    }),
  };
}

/** A card with the weights of a record: a table, or a picture if there are too many weights. */
function weightsCard(attended, title, svg) {
  const { queries, keys, weights, where, sides: [down, across] } = attended;
  const many = queries.length * keys.length > MAX_CELLS;
  const table = many ? null : weightTable(queries, keys, weights, { mark: true });
  const rest = 1 - weights.flat().reduce((a, b) => a + b, 0) / weights.length;
  const percent = Math.round(Math.max(rest, 0) * 100);
  const parts = many ? [pictureOf(svg, title)] : [ // the picture has its own caption
    make("h3", {}, title), named(`${down} down, ${across} across`), table.element,
    make("p", { class: "caption" }, `${where}. ${percent}% of the weight is on other tokens.`),
  ];
  return { card: make("section", { class: "card", "aria-label": title }, ...parts), table };
}

function pictureOf(svg, title) {
  const source = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  return make("img", { class: "picture", src: source, alt: title });
}

/** A text with its name above. A long text scrolls, so that two texts fit on the screen. */
function paneOf(name, text) {
  const long = text.element.classList.contains("long");
  return make("div", { class: long ? "pane long" : "pane" }, named(name), text.element);
}

/** Shows a record: the elements `above`, two texts as [name, text, options], with the attention
    weights of the first text's units on the second text's, and the element `below`. */
function showPair(out, view, body, record, queryText, keyText, show) {
  const { title, kind = "Words", above = [], below } = show;
  const { attended, svg } = record;
  const names = [queryText[0], keyText[0]];
  const query = textOf(queryText[1], attended?.queries, queryText[2]);
  const key = textOf(keyText[1], attended?.keys, keyText[2]);
  const panes = [paneOf(names[0], query), paneOf(names[1], key)];
  const aside = panes.every((pane) => pane.classList.contains("long"));
  const parts = [...above, make("div", { class: aside ? "pair aside" : "pair" }, ...panes)];
  const { card, table } = attended ? weightsCard(attended, title, svg) : {};
  const one = kind.toLowerCase().slice(0, -1);
  if (attended) {
    parts.push(linked({
      queries: query.spans, keys: key.spans, weights: attended.weights, table, names: attended,
      label: names.map((name) => `${kind} of the ${name.toLowerCase()}`),
      hint: `Point at a ${one}, or move through the ${one}s with the arrow keys.`,
    }));
  }
  out.replaceChildren(make("div", { class: "card" }, ...parts, below), ...(card ? [card] : []),
    more(view, body, svg));
}

/** Links below a result: the picture as a file, and the request as a curl command. */
function more(view, body, svg) {
  const json = JSON.stringify(body).replaceAll("'", "'\\''");
  const line = `curl -s --json '${json}' ${location.origin}/${view}`;
  const file = svg && URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
  return make("div", { class: "more" },
    svg ? make("a", { href: file, download: `${view}.svg` }, "Save the picture (SVG)") : null,
    make("details", {}, make("summary", {}, "The request as a command"), make("pre", {}, line)));
}

function recordFacts(record, extra = "") {
  const score = `score ${record.score.toFixed(2).replace("-", "−")}`;
  const tokens = counted(record.tokens, "token");
  return judged(record, facts(extra, `confidence ${record.confidence.toFixed(2)}`, score, tokens,
    seconds(record.seconds), record.model));
}

/** Puts the reasons against a result of low confidence before the facts of it. */
function judged(record, below) {
  if (!record.doubtful) return below;
  const said = `Low confidence ${record.confidence.toFixed(2)}: ${record.reasons.join("; ")}.`;
  return make("div", {}, make("p", { class: "doubt", role: "note", dir: "auto" }, said), below);
}

// ---------------------------------------------------------------------------------------- views

/** Each view has the word to show while it runs, and `run`, which sends the form's fields to the
    server and puts the result into `out`. */
const VIEWS = {
  translate: {
    doing: "Translating",
    async run(body, signal, out) {
      const record = await postJson("/translate", { ...body, svg: true }, signal);
      showPair(out, "translate", body, record, ["Translation", record.text], ["Source", record.source],
        { title: "Alignment", below: recordFacts(record) });
    },
  },

  summarize: {
    doing: "Summarizing",
    async run(body, signal, out) {
      const record = await postJson("/summarize", { ...body, svg: true }, signal);
      const { method, sentences } = record;
      const texts = [["Summary", record.text], ["Document", body.text]];
      let how = method === "whole" ? "" : `${counted(record.parts.length, "part")}, ${method}`;
      if (method === "extracted") { // the document's sentences attend to those of the summary
        texts.reverse();
        const at = positionsOf(body.text);
        texts[0].push({ places: sentences.map(({ start, end }) => [at(start), at(end)]) });
        const chosen = sentences.filter((sentence) => sentence.chosen).length;
        how = `${chosen} of ${counted(sentences.length, "sentence")}`;
      }
      showPair(out, "summarize", body, record, ...texts,
        { title: "Where it comes from", kind: "Sentences", below: recordFacts(record, how) });
    },
  },

  answer: {
    doing: "Answering",
    async run(body, signal, out) {
      const record = await postJson("/answer", { ...body, svg: true }, signal);
      const at = positionsOf(body.context);
      const marked = record.answered ? [at(record.start), at(record.end)] : null;
      const answer = record.answered
        ? make("p", { class: "text answer", dir: "auto" }, record.text)
        : make("p", { class: "text prompt" }, "No answer in this context.");
      const windows = record.windows > 1 ? counted(record.windows, "window") : "";
      showPair(out, "answer", body, record,
        ["Question", record.question], ["Context", body.context, { marked }], {
          title: "What the question attended to", above: [named("Answer"), answer],
          below: judged(record, facts(`confidence ${record.confidence.toFixed(2)}`,
            `probability ${record.probability.toFixed(2)}`, windows, seconds(record.seconds),
            record.model)),
        });
      reveal(out.querySelector("mark"));
    },
  },

  complete: {
    doing: "Completing",
    async run(body, signal, out) {
      const written = make("span", { class: "caret" });
      const growing = make("p", { class: "text", dir: "auto", "aria-busy": "true" },
        make("span", { class: "prompt" }, body.text), written);
      out.replaceChildren(make("div", { class: "card" }, growing));
      let record = null;
      try {
        for await (const line of lines("/complete", { ...body, stream: true, svg: true }, signal)) {
          if (line.piece !== undefined) written.append(line.piece);
          record = line.record ?? record;
        }
      } finally {
        written.classList.remove("caret");
        growing.removeAttribute("aria-busy");
      }
      if (record === null) throw new Error(BROKEN);
      const end = recordFacts(record, record.stopped ? "ended by the model" : "");
      const { attended } = record;
      if (!attended) return out.firstChild.append(end);
      const { prompt } = record;
      const text = textOf(prompt + record.text, attended.keys, { quiet: prompt.length });
      const { card, table } = weightsCard(attended, "What was attended to", record.svg);
      const status = linked({
        queries: text.spans.slice(-attended.queries.length), keys: text.spans,
        weights: attended.weights, table, both: false, names: attended,
        label: ["The text; point at its new words"],
        hint: "Point at a new word, or move through them with the arrow keys.",
      });
      out.replaceChildren(make("div", { class: "card" }, text.element, status, end), card,
        more("complete", body, record.svg));
    },
  },

  look: {
    doing: "Looking",
    async run(body, signal, out) {
      const { layer, head, ...whole } = body;
      const key = JSON.stringify(whole);
      if (this.key !== key || !out.firstChild) {
        this.key = null;
        const overview = await postJson("/look", whole, signal);
        out.replaceChildren(overviewOf(overview), make("div", { class: "head" }));
        this.key = key;
      }
      const chosen = layer === undefined ? null : `${layer}.${head}`;
      for (const button of out.querySelectorAll(".measure button")) {
        button.setAttribute("aria-pressed", String(button.dataset.head === chosen));
      }
      const place = out.querySelector(".head");
      if (chosen === null) return place.replaceChildren();
      const map = await postJson("/look", { ...body, svg: true }, signal);
      place.replaceChildren(headCard(map), more("look", body, map.svg));
      place.firstChild.scrollIntoView({ block: "nearest" });
    },
  },

  explain: {
    doing: "Explaining",
    async run(body, signal, out) {
      const trace = await postJson("/explain", body, signal);
      const follow = (word) => go("explain", { ...read(formOf("explain")), word });
      const words = trace.tokens.map((token) => make("button", {
        type: "button", class: "quiet", "aria-pressed": String(token === trace.word),
        onclick: () => follow(token),
      }, token));
      out.replaceChildren(
        make("div", { class: "card" },
          make("h3", {}, `Attention in “${trace.tokens.join(" ")}”`),
          facts(trace.subject, counted(trace.tokens.length, trace.subject ? "token" : "word"),
            counted(trace.heads, "head"), `queries and keys of width ${trace.dim}`),
          make("p", { class: "name follow" }, "Followed word"),
          make("div", { class: "chips chosen" }, ...words)),
        make("ol", { class: "steps" }, ...trace.steps.map((step, i) => stepOf(step, i + 1, trace))),
        checkOf(trace), more("explain", body, null));
    },
  },
};

function overviewOf(overview) {
  const { model, tokens, layers, values, notes } = overview;
  const what = `${model}, ${counted(tokens, "token")}: layers down, heads across.`;
  const panels = Object.entries(values).map(([name, rows]) =>
    measureOf(KNOWN.measures[name], layers, rows));
  return make("div", {}, make("p", { class: "facts" }, [what, ...notes].join(" ")),
    make("div", { class: "measures" }, ...panels));
}

function measureOf({ title, unit, meaning }, layers, rows) {
  const heading = make("h3", {}, title);
  const text = meaning[0].toUpperCase() + meaning.slice(1);
  if (!rows.flat().some((value) => value !== null)) {
    return make("section", { class: "card measure" }, heading,
      make("p", {}, `${text}: nothing to measure in this text.`));
  }
  const part = unit === "of the weight";
  const top = most(rows);
  const headOf = (value, i, j) => shade(make("button", {
    type: "button", "aria-pressed": "false", "data-head": `${layers[i]}.${j}`,
    "aria-label": `Layer ${layers[i]}, head ${j}: ${value.toPrecision(3)} ${unit}. See its map.`,
    onclick: () => go("look", { ...read(formOf("look")), layer: layers[i], head: String(j) }),
  }, part ? brief(value) : value.toFixed(value < 10 ? 2 : 0)), value, top);
  const body = rows.map((row, i) => make("tr", {}, make("th", { scope: "row" }, layers[i]),
    ...row.map((value, j) => make("td", {}, value === null ? "" : headOf(value, i, j)))));
  const heads = rows[0].map((_, j) => make("th", { scope: "col" }, String(j)));
  return make("section", { class: "card measure" }, heading,
    make("p", {}, `${text}, ${part ? "share of the weight" : `in ${unit}`}`),
    make("div", { class: "scroll" }, tableOf({}, heads, body)));
}

function headCard(map) {
  const title = `${map.model}: layer ${map.layer}, head ${map.head}`;
  const holder = make("section", { class: "card", "aria-label": title });
  if (map.pooled || map.queries.length * map.keys.length > MAX_CELLS) {
    holder.append(pictureOf(map.svg, title));
    return holder;
  }
  const across = map.layer.startsWith("cross");
  const tick = make("input", { type: "checkbox", onchange: () => draw() });
  function draw() {
    const out = tick.checked;
    const table = weightTable(map.queries, map.keys, map.weights, { out });
    const queries = chipsOf(map.queries);
    const keys = across ? chipsOf(map.keys) : queries;
    const status = linked({
      queries: queries.spans, keys: keys.spans, table, both: across,
      weights: out ? map.weights.map((row) => [0, ...row.slice(1)]) : map.weights,
      names: map,
      label: ["Query tokens", "Key tokens"],
      hint: "Point at a token, or move through the tokens with the arrow keys.",
    });
    const both = [named("Target"), queries.element, named("Source"), keys.element];
    holder.replaceChildren(
      make("div", { class: "bar" }, make("h3", {}, title),
        make("label", { class: "tick" }, tick, "Leave out the first token")),
      named("queries down, keys across"),
      ...(across ? both : [queries.element]),
      status, table.element,
      ...(map.notes.length ? [make("p", { class: "caption" }, map.notes.join(" "))] : []));
  }
  draw();
  return holder;
}

// -------------------------------------------------------------------------------------- explain

const MAX_HEADS = 4;
const MAX_WEIGHTS = 16; // elements of a matrix W; larger matrices are not shown
const MAX_FEATURES = 8; // columns of a table of embeddings
const MAX_WORDS = 24; // rows of a table, and columns of a table of words

function stepOf(step, number, trace) {
  const focus = trace.tokens.indexOf(trace.word);
  const tables = [];
  let bars = null;
  for (const numbers of step.numbers) {
    const { symbol, values, columns } = numbers;
    const deep = numbers.shape.length === 3;
    if (symbol.startsWith("W_") && values.flat().length > MAX_WEIGHTS) continue;
    (deep ? values.slice(0, MAX_HEADS) : [values]).forEach((matrix, head) => {
      const name = deep && trace.heads > 1 ? `${symbol}, ${trace.shown[head]}` : symbol;
      tables.push(numbersTable(name, numbers, matrix, trace, focus));
    });
    if (symbol === "A" && trace.shown.length === 1) {
      bars = barsOf(`${trace.word} attends to`, columns, values[0][focus]);
    }
  }
  return make("li", { class: "card" },
    make("h3", {}, make("span", { "aria-hidden": "true" }, String(number)), step.name),
    make("p", { class: "formula" }, step.formula), make("p", { class: "says" }, step.sentence),
    tables.length ? make("div", { class: "tables" }, ...tables) : null,
    step.notes.length ? make("pre", {}, step.notes.join("\n")) : null, bars);
}

function numbersTable(name, numbers, matrix, trace, focus) {
  const { symbol, rows, columns } = numbers;
  const count = trace.tokens.length;
  const weights = symbol === "A";
  const byQuery = rows.length === count && !["K", "V"].includes(symbol);
  const wide = columns.length === count || symbol.startsWith("weights of");
  const kept = wide ? MAX_WORDS : MAX_FEATURES;
  const cut = columns.length > kept;
  // Use as few decimals as the exact numbers need.
  const whole = (value) => Math.abs(value - Math.round(value)) < 1e-4;
  const exact = (digits) => matrix.flat().every((value) => whole((value ?? 0) * 10 ** digits));
  const digits = [0, 1, 2].find(exact) ?? 3;
  const body = matrix.slice(0, MAX_WORDS).map((row, i) => {
    const cells = row.slice(0, kept).map((value) => {
      const text = value === null ? "−∞" : value.toFixed(digits).replace("-", "−");
      const cell = make("td", {}, text);
      return weights ? shade(cell, value ?? 0, 1) : cell;
    });
    return make("tr", { class: byQuery && i === focus ? "followed" : null },
      make("th", { scope: "row" }, rows[i]), ...cells, cut ? make("td", {}, "…") : null);
  });
  const heads = columns.slice(0, kept).map((column) => make("th", { scope: "col" }, column));
  if (cut) heads.push(make("th", {}, "…"));
  const left = matrix.length - body.length;
  const rest = left > 0 ? `, ${left} more rows` : "";
  const shape = `  ${matrix.length} × ${columns.length}${rest}`;
  const caption = make("caption", {}, name, make("span", { class: "name" }, shape));
  return make("div", {}, make("div", { class: "scroll" },
    tableOf({ class: weights ? "map" : "plain" }, heads, body, caption)));
}

function barsOf(title, names, values) {
  const weights = values.map((value) => value ?? 0);
  const top = Math.max(...weights);
  return make("div", {}, make("p", { class: "name follow" }, title),
    make("div", { class: "bars" }, ...names.flatMap((name, i) => [
      make("span", {}, name), make("span", {}, weights[i].toFixed(3)),
      share(make("i", { "aria-hidden": "true" }), weights[i] / top)])));
}

function checkOf({ subject, agreement: { backend, difference, tolerance, holds } }) {
  const peer = subject ? "The model itself" : "regard.attention()";
  const size = (value) => value.toExponential(1);
  return make("div", { class: "card check" }, make("h3", {}, holds ? "✓ Check" : "✗ Check"),
    make("p", { class: "says" }, `${peer} computes the same in one call (backend “${backend}”). `
      + `Largest difference: ${size(difference)}, ${holds ? "within" : "ABOVE"} the tolerance `
      + `of ${size(tolerance)}.`));
}

// ------------------------------------------------------------------------------------- requests

async function post(path, body, signal) {
  let response;
  try {
    response = await fetch(path, {
      method: "POST", headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body), signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not respond. Is regard serve still running?");
  }
  if (response.ok) return response;
  const failure = await response.json().catch(() => null);
  throw new Error(failure?.error?.message ?? `The server responded with status ${response.status}.`);
}

const postJson = async (path, body, signal) => (await post(path, body, signal)).json();

const BROKEN = "The server stopped before the end. Is regard serve still running?";

/** Yields the JSON objects that a path streams, one per line. */
async function* lines(path, body, signal) {
  const stream = (await post(path, body, signal)).body.pipeThrough(new TextDecoderStream());
  const reader = stream.getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Error(BROKEN);
    });
    if (done) break;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) {
      const line = JSON.parse(part);
      if (line.error) throw new Error(line.error.message);
      yield line;
    }
  }
  if (rest) throw new Error(BROKEN);
}

// ------------------------------------------------------------------------- forms and the address

const sectionOf = (view) => document.querySelector(`[data-view=${view}]`);
const formOf = (view) => sectionOf(view).querySelector("form");

/** The values of a form as strings, by name. Empty and disabled fields are left out. */
function read(form) {
  return Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));
}

/** Converts the values of a form to the types of the API. */
function bodyOf(values) {
  const numbers = ["sentences", "max_new_tokens", "temperature", "seed", "head", "heads"];
  return Object.fromEntries(Object.entries(values).map(([name, value]) =>
    [name, numbers.includes(name) ? Number(value) : name === "causal" ? true : value]));
}

function fill(form, values) {
  form.reset();
  for (const field of form.elements) if (field.type === "hidden") field.value = "";
  if (form.elements.model && values.model !== undefined) choose(form.elements.model, values.model);
  adapt(form);
  for (const field of form.elements) {
    if (!field.name || !(field.name in values) || field.disabled) continue;
    if (field.type === "checkbox") field.checked = values[field.name] === "true";
    else if (field.tagName === "SELECT") choose(field, values[field.name]);
    else field.value = values[field.name];
  }
}

/** Selects a value from a link. If it is not among the options, it is added, and the server
    reports the error. */
function choose(select, value) {
  const offered = [...select.options].some((option) => option.value === value);
  if (!offered) select.append(make("option", { value }, value));
  select.value = value;
}

let models = [];

/** Shows the fields for the selected model. */
function adapt(form) {
  const view = form.closest("section").dataset.view;
  const model = models.find((item) => item.name === form.elements.model.value);
  if (view === "translate") {
    const [select, input] = form.querySelectorAll("[name=to]");
    const languages = model?.languages ?? [];
    const names = new Intl.DisplayNames(["en"], { type: "language" });
    const before = select.value || "fr";
    const options = languages.map((code) => make("option", { value: code }, names.of(code)));
    select.replaceChildren(...options);
    if (languages.includes(before)) select.value = before;
    for (const [field, shown] of [[select, languages.length > 0], [input, !languages.length]]) {
      field.hidden = field.disabled = !shown;
    }
  }
  if (view === "summarize") {
    const chosen = form.querySelector(".of-chosen");
    chosen.hidden = chosen.querySelector("input").disabled = form.elements.model.value !== "";
  }
  if (view === "explain") {
    const random = form.elements.model.value === "";
    for (const [name, shown] of [[".of-model", !random], [".of-random", random]]) {
      for (const label of form.querySelectorAll(name)) {
        label.hidden = !shown;
        label.querySelector("input").disabled = !shown;
      }
    }
    form.elements.sentence.required = !random;
  }
}

const running = {}; // view -> the function that stops its request
const shown = {}; // view -> the address of its result

function go(view, values) {
  const address = `#${view}?${new URLSearchParams(values)}`;
  if (location.hash === address) arrive(true);
  else location.hash = address;
}

/** Shows the view named in the address, and returns its name and the query. */
function turn() {
  const [name, query] = location.hash.slice(1).split(/\?(.*)/s);
  const view = Object.hasOwn(VIEWS, name) ? name : "translate";
  for (const section of document.querySelectorAll("main > section")) {
    section.hidden = section.dataset.view !== view;
  }
  for (const link of document.querySelectorAll("nav a")) {
    const here = link.getAttribute("href").split("?")[0] === `#${view}`;
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${view[0].toUpperCase()}${view.slice(1)} · regard`;
  return [view, query];
}

/** Runs the request in the address. */
function arrive(again = false) {
  const [view, query] = turn();
  if (query === undefined) {
    if (view === "explain" && !shown.explain) run(view); // explain needs no model and no text
    return;
  }
  if (!again && shown[view] === location.hash) return;
  fill(formOf(view), Object.fromEntries(new URLSearchParams(query)));
  run(view);
}

async function run(view) {
  running[view]?.();
  const section = sectionOf(view);
  const state = section.querySelector(".state");
  const out = section.querySelector(".result");
  const control = new AbortController();
  const began = performance.now();
  const elapsed = make("span", { "aria-hidden": "true" });
  const tick = setInterval(() => {
    elapsed.textContent = `${Math.round((performance.now() - began) / 1000)} s`;
  }, 1000);
  const stop = () => {
    control.abort();
    clearInterval(tick);
    state.replaceChildren();
    delete running[view];
  };
  running[view] = stop;
  state.replaceChildren(make("div", { class: "busy", role: "status" }, `${VIEWS[view].doing} …`,
    make("progress", { "aria-label": VIEWS[view].doing }), elapsed,
    make("button", { type: "button", class: "quiet", onclick: stop }, "Stop")));
  section.setAttribute("aria-busy", "true");
  const address = location.hash;
  shown[view] = address; // so that returning to the view does not run its request again
  const link = document.querySelector(`nav a[href^="#${view}"]`);
  link.href = address.includes("?") ? address : `#${view}`;
  try {
    await VIEWS[view].run(bodyOf(read(formOf(view))), control.signal, out);
    if (running[view] === stop) stop();
  } catch (error) {
    if (error.name === "AbortError") return;
    delete shown[view];
    stop();
    // Keep generated text, and keep the overview if the request of one head fails.
    if (view !== "complete" && !(view === "look" && VIEWS.look.key)) out.replaceChildren();
    state.replaceChildren(make("p", { class: "error", role: "alert" }, error.message));
  } finally {
    if (!running[view]) section.removeAttribute("aria-busy");
  }
}

// ---------------------------------------------------------------------------------------- start

async function start() {
  document.getElementById("version").textContent = KNOWN.version;
  turn();
  try {
    models = (await (await fetch("/models")).json()).models;
  } catch {
    models = []; // the next request reports the error
  }
  for (const view of Object.keys(VIEWS)) {
    const form = formOf(view);
    form.after(make("div", { class: "state" }), make("div", { class: "result" }));
    const able = models.filter((model) => model.can.includes(view));
    for (const model of able) {
      const size = model.parameters ? `${(model.parameters / 1e6).toFixed(1)} M parameters` : "";
      const about = [model.architecture, size, model.licence].filter(Boolean).join(", ");
      const any = view === "look" || view === "explain";
      const kind = any ? ` (${model.architecture.split(" ")[0]})` : "";
      const name = view === "summarize" ? `written by ${model.name}` : model.name + kind;
      const option = make("option", { value: model.name, title: about }, name);
      option.defaultSelected = view === "look" && model.name === "books-gpt2";
      form.elements.model.append(option);
    }
    form.reset();
    adapt(form);
    form.elements.model.addEventListener("change", () => adapt(form));
    form.addEventListener("input", (event) => {
      // Heads and words depend on the model and the text.
      if (event.target.type === "hidden") return;
      for (const field of form.querySelectorAll("[type=hidden]")) field.value = "";
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      go(view, read(form));
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
  }
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // do not change the address
    document.getElementById("main").focus();
  });
  addEventListener("hashchange", () => arrive());
  document.getElementById("main").removeAttribute("aria-busy");
  arrive();
}

start();
