/* Checks that tests run in the open page. Each returns a list of faults, or a number. */
globalThis.Checks ??= (() => {
  const PARTS = "header #stages #idea #time #sentence #yours #quiz #pool #legend #chat #queues #panel".split(" ");
  const MIN_CONTRAST = 4.5;

  /** Return how many pixels the page can be scrolled sideways. */
  const overflow = () => document.documentElement.scrollWidth - document.documentElement.clientWidth;

  function overlaps() {
    const boxes = PARTS.map((part) => [part, document.querySelector(part).getBoundingClientRect()]);
    const shown = boxes.filter(([, box]) => box.height > 0);
    const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
    const pairs = shown.flatMap((one, i) => shown.slice(i + 1).map((two) => [one, two]));
    return pairs.filter(([[, a], [, b]]) => meet(a, b)).map(([[a], [b]]) => `${a} ${b}`);
  }

  /** Return the texts with too little contrast to their background. */
  function paleTexts() {
    const texts = [...document.querySelectorAll("body *")].filter((element) => {
      const hasOwn = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
      return hasOwn && element.checkVisibility() && !["SCRIPT", "STYLE"].includes(element.tagName);
    });
    const ratio = (element) => contrast(rgba(getComputedStyle(element).color), backgroundOf(element));
    const pale = texts.filter((element) => ratio(element) < MIN_CONTRAST);
    return pale.map((element) => `${element.className} ${element.textContent}: ${ratio(element).toFixed(1)}`);
  }

  /** Return the first opaque color behind an element. The letter of a tag has its own background. */
  function backgroundOf(element) {
    for (let each = element; each; each = each.parentElement) {
      const style = getComputedStyle(each, each.className === "tag" ? "::after" : null);
      const color = rgba(style.backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255, 255];
  }

  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });

  /** Convert any CSS color to numbers, by painting it and reading it back. */
  function rgba(color) {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  }

  /** Return the contrast ratio as WCAG defines it. */
  function contrast(a, b) {
    const linear = (value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    const luminance = (rgb) => [0.2126, 0.7152, 0.0722].reduce((sum, part, i) => sum + part * linear(rgb[i] / 255), 0);
    const [dark, light] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (light + 0.05) / (dark + 0.05);
  }

  /** Return the duration of each transition in milliseconds. */
  function transitions() {
    const durations = (element) => getComputedStyle(element).transitionDuration.split(", ");
    const milliseconds = (time) => parseFloat(time) * (time.endsWith("ms") ? 1 : 1000);
    return [...document.querySelectorAll("*")].flatMap(durations).map(milliseconds);
  }

  return { overflow, overlaps, paleTexts, transitions };
})();
