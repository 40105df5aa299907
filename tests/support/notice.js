// What a person would notice on the page that is open: {texts, background, problems}.
// settings.within: a selector of the part that is looked at. settings.mayScroll: of what may be wider than the window.
// A text that was escaped twice shows its tags. Texts of a chart may stand on its own shapes.
(settings) => {
  const LEAST_SIZE = 8.9, LARGEST_IN_CHARTS = 18, LEAST_CONTRAST = 4.5;
  const root = document.querySelector(settings.within ?? "body");
  const problems = new Set();
  document.querySelectorAll("details").forEach(element => { element.open = true; });

  const channels = colour => colour.match(/[\d.]+/g).map(Number);
  const opacity = colour => channels(colour)[3] ?? 1;
  const luminance = colour => {
    const [r, g, b] = channels(colour).map(value => value / 255).map(
      value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [light, dark] = [luminance(one), luminance(other)].sort((a, b) => b - a);
    return (light + 0.05) / (dark + 0.05);
  };

  // The colour behind a text: in a chart, of the last shape drawn before it that is under it.
  const shapeBehind = (svg, text, box) => {
    const [x, y] = [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
    const under = [...svg.querySelectorAll("rect")].filter(shape => {
      const area = shape.getBoundingClientRect();
      return shape.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING
        && area.left <= x && x <= area.right && area.top <= y && y <= area.bottom;
    });
    return under.length ? getComputedStyle(under.at(-1)).fill : null;
  };
  const ground = element => {
    if (!element) return "rgb(255, 255, 255)";
    const colour = getComputedStyle(element).backgroundColor;
    return opacity(colour) < 1 ? ground(element.parentElement) : colour;
  };

  const isHidden = element => !element.checkVisibility({visibilityProperty: true, opacityProperty: true});
  const pieces = [];
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    if (!node.data.trim() || element.closest("script, style, title, noscript")) continue;
    if (isHidden(element)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect();
    if (box.width) pieces.push({node, element, box, words: node.data.trim().slice(0, 60)});
  }

  const mayScroll = element => element.closest(settings.mayScroll ?? "pre");
  for (const {node, element, box, words} of pieces) {
    const style = getComputedStyle(element), svg = element.closest("svg"), code = element.closest("pre, code");
    const tag = /<!doctype|<!--|<\/?[a-z][a-z0-9]*(\s[^>]*)?>|&(lt|gt|amp|quot|nbsp|#\d+);/i;
    if (!code && tag.test(node.data)) problems.add(`escaped tags: ${words}`);

    const colour = svg ? style.fill : style.color;
    const behind = (svg && shapeBehind(svg, element, box)) ?? ground(element);
    if (!element.closest(".highlight") && contrast(colour, behind) < LEAST_CONTRAST)
      problems.add(`${colour} on ${behind}: ${words}`);

    const scale = svg ? element.getScreenCTM().a : 1, size = parseFloat(style.fontSize) * scale;
    if (size < LEAST_SIZE) problems.add(`${size.toFixed(1)} px is too small: ${words}`);
    if (svg && size > LARGEST_IN_CHARTS) problems.add(`${size.toFixed(1)} px is too large: ${words}`);

    if (mayScroll(element)) continue;
    if (box.left < -1 || box.right > innerWidth + 1) problems.add(`outside the window: ${words}`);
    for (let frame = element; frame; frame = frame.parentElement) {
      const look = getComputedStyle(frame), area = frame.getBoundingClientRect();
      if (look.overflowX === "visible" || look.textOverflow === "ellipsis") continue;
      if (box.right > area.right + 1 || box.left < area.left - 1) problems.add(`cut off: ${words}`);
    }
  }

  for (const svg of root.querySelectorAll("svg")) {
    const area = svg.getBoundingClientRect();
    const labels = pieces.filter(piece => piece.element.closest("svg") === svg);
    labels.forEach(({box, words}, n) => {
      if (box.left < area.left - 1 || box.right > area.right + 1) problems.add(`outside its chart: ${words}`);
      for (const other of labels.slice(n + 1)) {
        if (box.left < other.box.right - 1 && other.box.left < box.right - 1
            && box.top < other.box.bottom - 4 && other.box.top < box.bottom - 4)
          problems.add(`covered: ${words} / ${other.words}`);
      }
    });
  }

  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth + 1) problems.add(`the page is ${wide} px wide in a window of ${innerWidth}`);
  for (const image of document.images) {
    if (!(image.complete && image.naturalWidth)) problems.add(`no image: ${image.alt || image.src.slice(0, 80)}`);
  }
  if (/^("?times|serif)/i.test(getComputedStyle(document.body).fontFamily)) problems.add("no style");
  if (document.compatMode !== "CSS1Compat") problems.add("no doctype");
  // A chart is no headline: the largest letters are those of a heading.
  const sizes = pieces.map(({element}) =>
    parseFloat(getComputedStyle(element).fontSize) * (element.closest("svg") ? element.getScreenCTM().a : 1));
  const largest = pieces[sizes.indexOf(Math.max(...sizes))];
  if (!largest?.element.closest("h1, h2")) problems.add(`larger than the headings: ${largest?.words}`);
  return {
    texts: pieces.length,
    largest: largest?.words,
    isDark: luminance(ground(document.querySelector("h1") ?? document.body)) < 0.2,
    problems: [...problems],
  };
}
