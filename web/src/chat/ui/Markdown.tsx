// Markdown as elements. Every text becomes a text node and every address was checked, so what a model writes cannot
// become markup, whatever it is.

import { verbatim } from "../../language/language";
import { useMemo } from "preact/hooks";
import { type Block, type Inline, parse } from "../markdown";

export function Markdown({ text }: { text: string }) {
  const blocks = useMemo(() => parse(text), [text]);
  return (
    <div class="prose">
      {blocks.map((block, index) => (
        <Part key={index} block={block} />
      ))}
    </div>
  );
}

function Part({ block }: { block: Block }) {
  switch (block.kind) {
    case "paragraph":
      return (
        <p>
          <Line inner={block.inner} />
        </p>
      );
    case "heading":
      return (
        <p class={`heading level-${block.level}`} role="heading" aria-level={Math.min(6, block.level + 2)}>
          <Line inner={block.inner} />
        </p>
      );
    case "code":
      return (
        <pre {...(block.language ? { "data-language": block.language } : {})} tabIndex={0}>
          <code>{block.text}</code>
        </pre>
      );
    case "quote":
      return (
        <blockquote>
          {block.inner.map((inner, index) => (
            <Part key={index} block={inner} />
          ))}
        </blockquote>
      );
    case "rule":
      return <hr />;
    case "list":
      return <List block={block} />;
  }
}

function List({ block }: { block: Block & { kind: "list" } }) {
  const items = block.items.map((item, index) => (
    <li key={index}>
      {item.map((inner, place) => (
        <Part key={place} block={inner} />
      ))}
    </li>
  ));
  return block.ordered ? <ol start={block.start}>{items}</ol> : <ul>{items}</ul>;
}

function Line({ inner }: { inner: Inline[] }) {
  return (
    <>
      {inner.map((one, index) => (
        <Piece key={index} one={one} />
      ))}
    </>
  );
}

function Piece({ one }: { one: Inline }) {
  switch (one.kind) {
    case "text":
      return <>{verbatim(one.text)}</>;
    case "code":
      return <code>{one.text}</code>;
    case "strong":
      return (
        <strong>
          <Line inner={one.inner} />
        </strong>
      );
    case "em":
      return (
        <em>
          <Line inner={one.inner} />
        </em>
      );
    case "link":
      return (
        <a href={one.href} target="_blank" rel="noreferrer noopener nofollow">
          <Line inner={one.inner} />
        </a>
      );
  }
}
