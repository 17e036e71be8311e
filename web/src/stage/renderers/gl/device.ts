// As much of WebGL 2 as the scene needs: a part is one draw call with its program, its vertices and, if it stands many
// times, an instance buffer; a texture has bytes of which parts can be sent again. Uniforms are set by the types that the
// program says they have.

type GL = WebGL2RenderingContext;

export interface Rectangle {
  x: number;
  y: number;
  width: number;
  height: number;
}

export class Texture {
  private readonly name: WebGLTexture;

  /** Four bytes a texel; `smooth`: read between them. */
  constructor(
    private readonly gl: GL,
    private readonly data: Uint8Array,
    readonly width: number,
    readonly height: number,
    smooth: boolean,
  ) {
    this.name = gl.createTexture();
    this.bind(0);
    const filter = smooth ? gl.LINEAR : gl.NEAREST;
    gl.texParameteri(gl.TEXTURE_2D, gl.TEXTURE_MIN_FILTER, filter);
    gl.texParameteri(gl.TEXTURE_2D, gl.TEXTURE_MAG_FILTER, filter);
    gl.texParameteri(gl.TEXTURE_2D, gl.TEXTURE_WRAP_S, gl.CLAMP_TO_EDGE);
    gl.texParameteri(gl.TEXTURE_2D, gl.TEXTURE_WRAP_T, gl.CLAMP_TO_EDGE);
    gl.texStorage2D(gl.TEXTURE_2D, 1, gl.RGBA8, width, height);
  }

  bind(unit: number): void {
    this.gl.activeTexture(this.gl.TEXTURE0 + unit);
    this.gl.bindTexture(this.gl.TEXTURE_2D, this.name);
  }

  /** Sends these parts of the bytes, or all of them. */
  send(parts: readonly Rectangle[] = [{ x: 0, y: 0, width: this.width, height: this.height }]): void {
    const { gl } = this;
    this.bind(0);
    gl.pixelStorei(gl.UNPACK_ROW_LENGTH, this.width);
    for (const { x, y, width, height } of parts) {
      gl.pixelStorei(gl.UNPACK_SKIP_PIXELS, x);
      gl.pixelStorei(gl.UNPACK_SKIP_ROWS, y);
      gl.texSubImage2D(gl.TEXTURE_2D, 0, x, y, width, height, gl.RGBA, gl.UNSIGNED_BYTE, this.data);
    }
  }

  dispose(): void {
    this.gl.deleteTexture(this.name);
  }
}

export interface Uniform<Value = number | Float32Array | Texture> {
  value: Value;
}

export type Uniforms = Readonly<Record<string, Uniform>>;

interface Make {
  vertex: string;
  fragment: string;
  uniforms: Uniforms;
  /** By the names in the shader: numbers of each vertex, and how many there are of it. */
  vertices: Readonly<Record<string, readonly [numbers: readonly number[], size: number]>>;
  index?: readonly number[];
  /** Numbers of each instance, one after the other, by their names and sizes. */
  each?: { data: Float32Array; fields: Readonly<Record<string, number>> };
  bothSides?: boolean;
  over?: boolean; // laid over what is there, by its opacity, and hides nothing
  depth?: boolean; // whether what is nearer hides it
}

export class Part {
  visible = true;
  instances = 1;
  private readonly program: WebGLProgram;
  private readonly array: WebGLVertexArrayObject;
  private readonly buffers: WebGLBuffer[] = [];
  private readonly places: readonly { info: WebGLActiveInfo; place: WebGLUniformLocation }[];
  private readonly corners: number;

  constructor(
    private readonly gl: GL,
    private readonly make: Make,
  ) {
    this.program = linked(gl, make.vertex, make.fragment);
    this.array = gl.createVertexArray();
    gl.bindVertexArray(this.array);
    if (make.each) this.attributes(make.each.data, Object.entries(make.each.fields), 1);
    let corners = 0;
    for (const [name, [numbers, size]] of Object.entries(make.vertices)) {
      this.attributes(new Float32Array(numbers), [[name, size]], 0);
      corners = numbers.length / size;
    }
    if (make.index) {
      corners = make.index.length;
      this.buffer(gl.ELEMENT_ARRAY_BUFFER, new Uint16Array(make.index));
    }
    this.corners = corners;
    const count = gl.getProgramParameter(this.program, gl.ACTIVE_UNIFORMS) as number;
    this.places = Array.from({ length: count || 0 }, (_, i) => gl.getActiveUniform(this.program, i)).flatMap((info) => {
      const place = info && gl.getUniformLocation(this.program, info.name);
      return info && place ? [{ info, place }] : [];
    });
  }

  private buffer(target: number, data: Float32Array | Uint16Array): void {
    const name = this.gl.createBuffer();
    this.buffers.push(name);
    this.gl.bindBuffer(target, name);
    this.gl.bufferData(target, data, this.gl.DYNAMIC_DRAW);
  }

  private attributes(data: Float32Array, fields: [string, number][], divisor: number): void {
    const { gl } = this;
    this.buffer(gl.ARRAY_BUFFER, data);
    const stride = 4 * fields.reduce((sum, [, size]) => sum + size, 0);
    let from = 0;
    for (const [name, size] of fields) {
      const at = gl.getAttribLocation(this.program, name);
      if (at >= 0) {
        gl.enableVertexAttribArray(at);
        gl.vertexAttribPointer(at, size, gl.FLOAT, false, stride, from);
        gl.vertexAttribDivisor(at, divisor);
      }
      from += 4 * size;
    }
  }

  /** Sends so many numbers of the instance buffer. */
  changed(numbers: number): void {
    const { gl, make } = this;
    if (!make.each || numbers === 0) return;
    gl.bindBuffer(gl.ARRAY_BUFFER, this.buffers[0] ?? null);
    gl.bufferSubData(gl.ARRAY_BUFFER, 0, make.each.data, 0, numbers);
  }

  /** Draws it; returns the triangles. */
  draw(): number {
    const { gl, make, corners, instances } = this;
    gl.useProgram(this.program);
    this.setUniforms();
    const set = (what: number, on: boolean): void => (on ? gl.enable(what) : gl.disable(what));
    set(gl.CULL_FACE, !make.bothSides);
    set(gl.BLEND, make.over === true);
    set(gl.DEPTH_TEST, make.depth !== false);
    gl.depthMask(!make.over);
    gl.bindVertexArray(this.array);
    if (make.index) gl.drawElementsInstanced(gl.TRIANGLES, corners, gl.UNSIGNED_SHORT, 0, instances);
    else gl.drawArraysInstanced(gl.TRIANGLES, 0, corners, instances);
    return (corners / 3) * instances;
  }

  private setUniforms(): void {
    const { gl } = this;
    let unit = 0;
    for (const { info, place } of this.places) {
      const value = this.make.uniforms[info.name]?.value;
      if (value instanceof Texture) {
        value.bind(unit);
        gl.uniform1i(place, unit++);
      } else if (value instanceof Float32Array) {
        if (info.type === gl.FLOAT_VEC2) gl.uniform2fv(place, value);
        else if (info.type === gl.FLOAT_VEC3) gl.uniform3fv(place, value);
        else if (info.type === gl.FLOAT_VEC4) gl.uniform4fv(place, value);
        else gl.uniformMatrix4fv(place, false, value);
      } else if (info.type === gl.INT) gl.uniform1i(place, value ?? 0);
      else gl.uniform1f(place, value ?? 0);
    }
  }

  dispose(): void {
    const { gl } = this;
    gl.deleteVertexArray(this.array);
    for (const buffer of this.buffers) gl.deleteBuffer(buffer);
    gl.deleteProgram(this.program);
  }
}

function linked(gl: GL, ...sources: [vertex: string, fragment: string]): WebGLProgram {
  const program = gl.createProgram();
  const shaders = sources.map((source, i) => {
    const shader = gl.createShader(i === 0 ? gl.VERTEX_SHADER : gl.FRAGMENT_SHADER);
    if (shader === null) throw new Error("The graphics context is lost.");
    gl.shaderSource(shader, `#version 300 es\n${source}`);
    gl.compileShader(shader);
    gl.attachShader(program, shader);
    return shader;
  });
  gl.linkProgram(program);
  if (gl.getProgramParameter(program, gl.LINK_STATUS) === false && !gl.isContextLost())
    throw new Error(shaders.map((shader) => gl.getShaderInfoLog(shader)).join(" ") || "A shader does not link.");
  for (const shader of shaders) gl.deleteShader(shader);
  return program;
}
