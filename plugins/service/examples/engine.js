// A rollout engine in plain JavaScript: it samples the rows of a `rillflow run` over HTTP.
//
//     node engine.js RUN/service/main-0.json [name]        several processes share the rows of a run
//
//     take ─> rows ─ newest weights ─> prompts once, then every row token by token ─> put
//
// It needs Node 18 or later and no package. It runs decoders of the types llama and qwen2 in float32 or bfloat16:
// embedding, RMSNorm, rotary attention with grouped keys, SwiGLU.
'use strict';
const { createHash } = require('node:crypto');
const { readFileSync } = require('node:fs');
const http = require('node:http');

const TAKE = { count: 512, lease_s: 120, wait_s: 10 };
const [address, name = 'engine.js'] = process.argv.slice(2);

// HTTP

class Refused extends Error {
  constructor(status, said) {
    super(`${status}: ${said}`);
    this.status = status;
  }
}

function ask(run, method, path, body) {
  return new Promise((resolve, reject) => {
    const headers = { authorization: `Bearer ${run.token}`, 'x-rillflow-client': name };
    const data = body === undefined ? undefined : Buffer.from(JSON.stringify(body));
    if (data) headers['content-length'] = data.length;
    const request = http.request(`${run.url}/${path}`, { method, headers, agent: false }, (answer) => {
      const parts = [];
      answer.on('data', (part) => parts.push(part));
      answer.on('error', () => reject(new Refused(410, 'the answer was cut off')));
      answer.on('end', () => {
        const found = Buffer.concat(parts);
        if (answer.statusCode >= 400) reject(new Refused(answer.statusCode, found.toString()));
        else resolve(found);
      });
    });
    request.on('error', reject);
    request.end(data);
  });
}

// Weights

function tensorsOf(file) {
  const headerBytes = Number(file.readBigUInt64LE(0));
  const header = JSON.parse(file.subarray(8, 8 + headerBytes));
  const found = new Map();
  for (const [key, { dtype, data_offsets: [start, end] }] of Object.entries(header)) {
    if (key === '__metadata__') continue;
    const bytes = Uint8Array.from(file.subarray(8 + headerBytes + start, 8 + headerBytes + end));
    if (dtype === 'F32') found.set(key, new Float32Array(bytes.buffer));
    else if (dtype === 'BF16') {
      const halves = new Uint16Array(bytes.buffer);
      const wide = new Uint32Array(halves.length);
      for (let i = 0; i < halves.length; i++) wide[i] = halves[i] << 16;
      found.set(key, new Float32Array(wide.buffer));
    } else throw new Error(`${key} is ${dtype}; this engine reads F32 and BF16`);
  }
  return found;
}

async function newestWeights(run, version) {
  const answer = await ask(run, 'GET', `weights?newer_than=${version}&wait_s=0`);
  if (!answer.length) return null;
  const manifest = JSON.parse(answer);
  const tensors = new Map();
  for (const { name: file, sha256 } of manifest.files) {
    const data = await ask(run, 'GET', `weights/${manifest.version}/${file}`);
    if (createHash('sha256').update(data).digest('hex') !== sha256) throw new Error(`${file} arrived damaged`);
    for (const [key, tensor] of tensorsOf(data)) tensors.set(key, tensor);
  }
  return { version: manifest.version, tensors };
}

// Model: every lane is a row, or a prompt, with keys and values of its own

class Model {
  constructor({ config, context, vocabulary }) {
    if (!['llama', 'qwen2'].includes(config.model_type)) throw new Error(`no ${config.model_type} here`);
    this.config = config;
    this.context = context;
    this.vocabulary = vocabulary;
    this.heads = config.num_attention_heads;
    this.kvHeads = config.num_key_value_heads ?? this.heads;
    this.headSize = config.head_dim ?? config.hidden_size / this.heads;
    this.kvSize = this.kvHeads * this.headSize;
    const theta = config.rope_parameters?.rope_theta ?? config.rope_theta ?? 10000;
    const half = this.headSize / 2;
    this.cos = new Float32Array(context * half);
    this.sin = new Float32Array(context * half);
    for (let place = 0; place < context; place++) {
      for (let i = 0; i < half; i++) {
        const angle = place * theta ** (-i / half);
        this.cos[place * half + i] = Math.cos(angle);
        this.sin[place * half + i] = Math.sin(angle);
      }
    }
  }

  load(tensors) {
    const need = (key) => {
      if (!tensors.has(key)) throw new Error(`the weights lack ${key}`);
      return tensors.get(key);
    };
    const linear = (key) => ({ weight: need(`${key}.weight`), bias: tensors.get(`${key}.bias`) });
    this.embedding = need('model.embed_tokens.weight');
    this.norm = need('model.norm.weight');
    this.head = { weight: tensors.get('lm_head.weight') ?? this.embedding };
    this.layers = Array.from({ length: this.config.num_hidden_layers }, (_, index) => {
      const at = `model.layers.${index}`;
      return {
        before: need(`${at}.input_layernorm.weight`),
        after: need(`${at}.post_attention_layernorm.weight`),
        q: linear(`${at}.self_attn.q_proj`),
        k: linear(`${at}.self_attn.k_proj`),
        v: linear(`${at}.self_attn.v_proj`),
        o: linear(`${at}.self_attn.o_proj`),
        gate: linear(`${at}.mlp.gate_proj`),
        up: linear(`${at}.mlp.up_proj`),
        down: linear(`${at}.mlp.down_proj`),
      };
    });
  }

  lane(length) {
    const part = () => this.layers.map(() => new Float32Array(length * this.kvSize));
    return { keys: part(), values: part(), count: 0 };
  }

  fork(lane, length) {
    const copy = this.lane(length);
    copy.count = lane.count;
    lane.keys.forEach((held, i) => copy.keys[i].set(held.subarray(0, lane.count * this.kvSize)));
    lane.values.forEach((held, i) => copy.values[i].set(held.subarray(0, lane.count * this.kvSize)));
    return copy;
  }

  // Feeds one token to every lane; returns [lanes, vocabulary] logits.
  pass(lanes, tokens) {
    const size = this.config.hidden_size;
    const x = new Float32Array(lanes.length * size);
    tokens.forEach((token, n) => x.set(this.embedding.subarray(token * size, (token + 1) * size), n * size));
    this.layers.forEach((layer, index) => {
      const seen = this.normed(x, layer.before, lanes.length);
      add(x, matmul(this.attended(lanes, seen, layer, index), layer.o, lanes.length, size));
      const inner = this.config.intermediate_size;
      const read = this.normed(x, layer.after, lanes.length);
      const gate = matmul(read, layer.gate, lanes.length, inner);
      const up = matmul(read, layer.up, lanes.length, inner);
      for (let i = 0; i < gate.length; i++) gate[i] = (gate[i] / (1 + Math.exp(-gate[i]))) * up[i];
      add(x, matmul(gate, layer.down, lanes.length, size));
    });
    lanes.forEach((lane) => lane.count++);
    return matmul(this.normed(x, this.norm, lanes.length), this.head, lanes.length, this.vocabulary);
  }

  attended(lanes, seen, layer, index) {
    const { heads, headSize, kvSize } = this;
    const wide = heads * headSize;
    const q = matmul(seen, layer.q, lanes.length, wide);
    const k = matmul(seen, layer.k, lanes.length, kvSize);
    const v = matmul(seen, layer.v, lanes.length, kvSize);
    const out = new Float32Array(lanes.length * wide);
    lanes.forEach((lane, n) => {
      const [keys, values, place] = [lane.keys[index], lane.values[index], lane.count];
      this.turn(q, n * wide, heads, place);
      this.turn(k, n * kvSize, this.kvHeads, place);
      keys.set(k.subarray(n * kvSize, (n + 1) * kvSize), place * kvSize);
      values.set(v.subarray(n * kvSize, (n + 1) * kvSize), place * kvSize);
      for (let head = 0; head < heads; head++) {
        const from = Math.floor(head / (heads / this.kvHeads)) * headSize;
        const at = n * wide + head * headSize;
        const scores = new Float64Array(place + 1);
        let most = -Infinity;
        for (let t = 0; t <= place; t++) {
          let dot = 0;
          for (let i = 0; i < headSize; i++) dot += q[at + i] * keys[t * kvSize + from + i];
          scores[t] = dot / Math.sqrt(headSize);
          most = Math.max(most, scores[t]);
        }
        let total = 0;
        for (let t = 0; t <= place; t++) total += scores[t] = Math.exp(scores[t] - most);
        for (let t = 0; t <= place; t++) {
          const share = scores[t] / total;
          for (let i = 0; i < headSize; i++) out[at + i] += share * values[t * kvSize + from + i];
        }
      }
    });
    return out;
  }

  // Rotates every head's pairs (i, i + half) by the angles of a position.
  turn(x, at, heads, place) {
    const half = this.headSize / 2;
    for (let head = 0; head < heads; head++) {
      for (let i = 0; i < half; i++) {
        const [cos, sin] = [this.cos[place * half + i], this.sin[place * half + i]];
        const [a, b] = [at + head * this.headSize + i, at + head * this.headSize + half + i];
        const [first, second] = [x[a], x[b]];
        x[a] = first * cos - second * sin;
        x[b] = second * cos + first * sin;
      }
    }
  }

  normed(x, weight, rows) {
    const size = weight.length;
    const out = new Float32Array(rows * size);
    for (let n = 0; n < rows; n++) {
      let sum = 0;
      for (let i = 0; i < size; i++) sum += x[n * size + i] ** 2;
      const scale = 1 / Math.sqrt(sum / size + this.config.rms_norm_eps);
      for (let i = 0; i < size; i++) out[n * size + i] = x[n * size + i] * scale * weight[i];
    }
    return out;
  }
}

function add(x, y) {
  for (let i = 0; i < x.length; i++) x[i] += y[i];
}

// [rows, outputs] = x [rows, inputs] @ weight [outputs, inputs]^T + bias; four outputs share each load of x.
function matmul(x, { weight, bias }, rows, outputs) {
  const inputs = weight.length / outputs;
  const out = new Float32Array(rows * outputs);
  for (let first = 0; first < outputs; first += 4) {
    const count = Math.min(4, outputs - first);
    const [w0, w1, w2, w3] = [0, 1, 2, 3].map((i) => (first + Math.min(i, count - 1)) * inputs);
    for (let n = 0; n < rows; n++) {
      const at = n * inputs;
      let [a, b, c, d] = [0, 0, 0, 0];
      for (let i = 0; i < inputs; i++) {
        const value = x[at + i];
        a += value * weight[w0 + i];
        b += value * weight[w1 + i];
        c += value * weight[w2 + i];
        d += value * weight[w3 + i];
      }
      const sums = [a, b, c, d];
      for (let i = 0; i < count; i++) out[n * outputs + first + i] = sums[i] + (bias ? bias[first + i] : 0);
    }
  }
  return out;
}

// Sampling

// A generator of numbers in [0, 1) from a row's seed (mulberry32): a row's text is the same in any batch.
function numbers(seed) {
  let state = (seed ^ Math.floor(seed / 2 ** 32)) >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

function drawn(logits, temperature, random) {
  let best = 0;
  for (let i = 1; i < logits.length; i++) if (logits[i] > logits[best]) best = i;
  let total = 0;
  const weights = Float64Array.from(logits, (each) => {
    const weight = Math.exp((each - logits[best]) / (temperature || 1));
    total += weight;
    return weight;
  });
  let token = best;
  if (temperature > 0) {
    let left = random() * total;
    for (token = 0; token < weights.length - 1 && left >= weights[token]; token++) left -= weights[token];
  }
  return { token, logprob: Math.log(weights[token] / total) };
}

// Feeds every different prompt once, all of them together; returns its lane and last logits by prompt.
function prompted(model, rows) {
  const prompts = new Map(rows.map((row) => [row.tokens.join(), { tokens: row.tokens }]));
  const open = [...prompts.values()];
  for (const each of open) each.lane = model.lane(each.tokens.length);
  for (let place = 0; ; place++) {
    const fed = open.filter((each) => place < each.tokens.length);
    if (!fed.length) return prompts;
    const logits = model.pass(fed.map((each) => each.lane), fed.map((each) => each.tokens[place]));
    fed.forEach((each, n) => {
      each.logits = logits.slice(n * model.vocabulary, (n + 1) * model.vocabulary);
    });
  }
}

function sampled(model, rows, stops, version) {
  const prompts = prompted(model, rows);
  let running = rows.map((row) => {
    const { lane, logits } = prompts.get(row.tokens.join());
    const made = { row: row.row, version, tokens: [], logprobs: [], finish: 'length' };
    return { row, made, logits, lane: model.fork(lane, row.tokens.length + row.max_tokens), random: numbers(row.seed) };
  });
  const ended = [];
  for (;;) {
    for (const each of running) {
      const { token, logprob } = drawn(each.logits, each.row.temperature, each.random);
      each.made.tokens.push(token);
      each.made.logprobs.push(logprob);
      each.isOver = stops.has(token) || each.made.tokens.length === each.row.max_tokens;
      if (stops.has(token)) each.made.finish = 'stop';
      if (each.isOver) ended.push(each.made);
    }
    running = running.filter((each) => !each.isOver);
    if (!running.length) return ended;
    const logits = model.pass(running.map((each) => each.lane), running.map((each) => each.made.tokens.at(-1)));
    running.forEach((each, n) => {
      each.logits = logits.subarray(n * model.vocabulary, (n + 1) * model.vocabulary);
    });
  }
}

// Waits for the run: a file that a killed run has left behind names an address where nobody answers.
async function connected() {
  for (;;) {
    try {
      const run = JSON.parse(readFileSync(address));
      return [run, JSON.parse(await ask(run, 'GET', 'model'))];
    } catch (error) {
      if (!['ENOENT', 'ECONNREFUSED'].includes(error.code)) throw error;
      await new Promise((resolve) => setTimeout(resolve, 200));
    }
  }
}

async function main() {
  const [run, about] = await connected();
  const [model, stops] = [new Model(about), new Set(about.stop_tokens)];
  if (about.stop.length) throw new Error('this engine knows no tokeniser, so no stop texts');
  let [version, total] = [-1, 0];
  for (;;) {
    const answer = await ask(run, 'POST', 'rows/take', TAKE);
    if (!answer.length) continue;
    const { lease, rows } = JSON.parse(answer);
    try {
      const newest = await newestWeights(run, version);
      if (newest) {
        model.load(newest.tensors);
        version = newest.version;
      }
      await ask(run, 'POST', 'rows/put', { lease, rows: sampled(model, rows, stops, version) });
      total += rows.length;
    } catch (error) {
      // 409: the lease has ended and its rows went to others. 410: these weights are gone, newer ones are coming.
      if (!(error instanceof Refused && [409, 410].includes(error.status))) throw error;
      await ask(run, 'POST', 'rows/return', { lease }).catch(() => {});
    }
    process.stderr.write(`\r${total} rows, version ${version} `);
  }
}

main().catch((error) => {
  const isOver = error.status === 410 || ['ECONNREFUSED', 'ECONNRESET'].includes(error.code);
  console.error(isOver ? '\nthe run has ended' : error);
  process.exit(isOver ? 0 : 1);
});
