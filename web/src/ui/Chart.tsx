// Lines over the positions of a text: a few series with one scale, and the last value of each in words.

interface Point {
  x: number;
  y: number;
}

export interface Line {
  name: string;
  role: string; // a colour of roles.css; the second line is dashed, too
  points: readonly Point[];
}

const WIDTH = 300;
const HEIGHT = 90;

export function Chart({
  name,
  lines,
  format,
}: {
  name: string;
  lines: readonly Line[];
  format: (y: number) => string;
}) {
  const all = lines.flatMap((line) => line.points);
  const first = Math.min(...all.map(({ x }) => x));
  const last = Math.max(...all.map(({ x }) => x), first + 1);
  const most = Math.max(...all.map(({ y }) => y), 1e-9);
  const place = ({ x, y }: Point) =>
    `${(((x - first) / (last - first)) * WIDTH).toFixed(1)} ${(HEIGHT - (y / most) * (HEIGHT - 4)).toFixed(1)}`;
  return (
    <figure class="chart">
      <figcaption>
        {name}
        <span class="chart-most">{all.length > 0 ? `up to ${format(most)}` : ""}</span>
      </figcaption>
      <svg
        viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
        preserveAspectRatio="none"
        role="img"
        aria-label={`${name}: ${lines.map((line) => `${line.name} ${now(line, format)}`).join(", ")}`}
      >
        {lines.map(({ role, points }) => (
          <polyline
            key={role}
            data-role={role}
            points={points.map(place).join(" ")}
            style={{ stroke: `var(--${role})` }}
          />
        ))}
      </svg>
      <p class="chart-key">
        {lines.map((line) => (
          <span key={line.role} data-role={line.role}>
            <i aria-hidden="true" style={{ borderColor: `var(--${line.role})` }} /> {line.name}{" "}
            <b>{now(line, format)}</b>
          </span>
        ))}
        <span class="chart-x">t = {all.length > 0 ? `${first} to ${last}` : "–"}</span>
      </p>
    </figure>
  );
}

function now({ points }: Line, format: (y: number) => string): string {
  const latest = points.at(-1);
  return latest ? format(latest.y) : "–";
}
