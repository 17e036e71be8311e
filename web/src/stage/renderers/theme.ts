// The colours of both renderers, taken from the page's CSS custom properties, so that they follow one design and its
// light and dark form. Any CSS colour will do: the browser itself turns it into red, green and blue. The fallbacks are
// the dark form.

export type Rgb = readonly [number, number, number]; // 0..1, as the screen has them (sRGB)

const FALLBACK = {
  bg: "#0c0f14",
  panel: "#141922",
  ink: "#e8ecf2",
  dim: "#8b96a8",
  line: "#2a3342",
  accent: "#f2b441",
  prompt: "#5d6f8c",
  generated: "#e8ecf2",
  kept: "#2f7fc1",
  fresh: "#2fd6a0",
  recomputed: "#f0662e",
  beam: "#ffd27a",
  empty: "#3a4558",
} as const;

export type Role = keyof typeof FALLBACK;
export interface Palette extends Record<Role, Rgb> {
  dark: boolean;
  ground: Rgb; // under the cache
  outline: Rgb; // of what is not there
}

let probe: CanvasRenderingContext2D | null = null;

function parse(colour: string, fallback: string): Rgb {
  probe ??= Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", {
    willReadFrequently: true,
  });
  if (!probe) return [0.5, 0.5, 0.5];
  probe.fillStyle = fallback;
  if (colour) probe.fillStyle = colour; // an unknown colour leaves the fallback
  probe.clearRect(0, 0, 1, 1);
  probe.fillRect(0, 0, 1, 1);
  const [r = 0, g = 0, b = 0] = probe.getImageData(0, 0, 1, 1).data;
  return [r / 255, g / 255, b / 255];
}

export function readPalette(): Palette {
  const style = getComputedStyle(document.documentElement);
  const colours = {} as Record<Role, Rgb>;
  for (const role of Object.keys(FALLBACK) as Role[])
    colours[role] = parse(style.getPropertyValue(`--${role}`).trim(), FALLBACK[role]);
  const dark = luminance(colours.bg) < luminance(colours.ink);
  return {
    ...colours,
    dark,
    ground: dark ? mix(colours.panel, colours.line, 0.3) : colours.panel,
    outline: mix(colours.empty, colours.dim, 0.45),
  };
}

export function luminance([r, g, b]: Rgb): number {
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

export function mix(a: Rgb, b: Rgb, share: number): Rgb {
  return [a[0] + (b[0] - a[0]) * share, a[1] + (b[1] - a[1]) * share, a[2] + (b[2] - a[2]) * share];
}

export function css([r, g, b]: Rgb, alpha = 1): string {
  return `rgba(${Math.round(r * 255)}, ${Math.round(g * 255)}, ${Math.round(b * 255)}, ${alpha})`;
}
