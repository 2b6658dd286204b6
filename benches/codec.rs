//! Weights per second per core, for every format: what decides how long a model takes to quantize.
//!
//! `cargo bench --bench codec [FILTER]`. One thread throughout; criterion's `elem/s` are weights per second.
//!
//! - `encode`: f32 weights in the model's own basis to bytes, rotation included where the format rotates;
//! - `decode`: bytes to f32 in the format's own basis (no inverse rotation);
//! - `rotate`: the forward rotation alone, on the same weights;
//! - `reference`: copies of the same weights, which no codec can beat by much. `copy` goes through the whole
//!   working set, `copy_row` row by row into one row's buffer, as the encoders read.
//!
//! Every iteration walks the whole working set: 64 MiB of f32 weights, or `BITLANE_BENCH_MIB`. That is more than
//! a core's own caches, but may fit the last level of a server; a whole model is quantized from the page cache,
//! so the figures are meant to be read beside `reference` of the same run.

use std::hint::black_box;
use std::time::Duration;

use bitlane::format::{Basis, rotation};
use bitlane::{Format, ScaleRounding};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

/// Columns of W: a usual reduction length, and a multiple of every block.
const K: usize = 4096;
/// Rows of the tallest strip (t2): every format's strips divide it.
const TALLEST: usize = 32;

/// Name of the processor as the system gives it.
fn cpu_name() -> String {
    std::fs::read_to_string("/proc/cpuinfo")
        .ok()
        .and_then(|text| {
            let line = text.lines().find(|l| l.starts_with("model name"))?;
            Some(line.split_once(':')?.1.trim().to_string())
        })
        .unwrap_or_else(|| "unknown CPU".into())
}

/// Rows of the working set: `BITLANE_BENCH_MIB` (default 64) of f32, in whole strips of every format.
fn rows() -> usize {
    let mib = std::env::var("BITLANE_BENCH_MIB").ok().and_then(|v| v.parse::<usize>().ok()).unwrap_or(64).max(1);
    (mib << 20).div_ceil(TALLEST * K * size_of::<f32>()) * TALLEST
}

/// Bell-shaped weights of a usual size: a sum of uniforms from a fixed generator.
fn weights(n: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / 16_777_216.0 - 0.5
    };
    (0..n).map(|_| (uniform() + uniform() + uniform() + uniform()) * 0.035).collect()
}

fn strip_bytes(format: Format) -> usize {
    let s = format.spec();
    K / s.block_cols * s.block_bytes
}

/// What quantization does with each strip, less threads and allocation.
fn encode(format: Format, weights: &[f32], scratch: &mut Vec<f32>, bytes: &mut [u8]) {
    let s = format.spec();
    for (w, b) in weights.chunks_exact(s.block_rows * K).zip(bytes.chunks_exact_mut(strip_bytes(format))) {
        let w = if s.basis == Basis::Rotated {
            scratch.clear();
            scratch.extend_from_slice(w);
            rotation::forward(scratch);
            &scratch[..]
        } else {
            w
        };
        s.codec.encode(w, K, ScaleRounding::NearestEven, b).expect("small finite weights fit every format");
    }
}

fn decode(format: Format, bytes: &[u8], out: &mut [f32]) {
    let s = format.spec();
    for (b, o) in bytes.chunks_exact(strip_bytes(format)).zip(out.chunks_exact_mut(s.block_rows * K)) {
        s.codec.decode(b, K, o);
    }
}

fn codecs(c: &mut Criterion) {
    let rows = rows();
    let w = weights(rows * K);
    println!("{}; one thread; working set {} MiB of f32 weights, [{rows}, {K}]", cpu_name(), size_of_val(&w[..]) >> 20);
    let elements = Throughput::Elements(w.len() as u64);
    let mut out = vec![0f32; w.len()];
    let mut scratch = Vec::new();

    let mut g = c.benchmark_group("reference");
    g.throughput(Throughput::Bytes(size_of_val(&w[..]) as u64));
    g.bench_function("copy", |b| b.iter(|| black_box(&mut out[..]).copy_from_slice(black_box(&w))));
    let mut row = vec![0f32; K];
    g.bench_function("copy_row", |b| {
        b.iter(|| black_box(&w[..]).chunks_exact(K).for_each(|w| black_box(&mut row[..]).copy_from_slice(w)))
    });
    g.finish();

    let mut g = c.benchmark_group("rotate");
    g.throughput(elements.clone());
    g.bench_function("forward", |b| {
        b.iter(|| {
            for w in black_box(&w[..]).chunks_exact(K) {
                row.copy_from_slice(w);
                rotation::forward(black_box(&mut row[..]));
            }
        })
    });
    g.finish();

    let mut g = c.benchmark_group("encode");
    g.throughput(elements.clone());
    for &format in Format::ALL {
        let mut bytes = vec![0u8; rows / format.spec().block_rows * strip_bytes(format)];
        g.bench_function(format.name(), |b| {
            b.iter(|| encode(format, black_box(&w), &mut scratch, black_box(&mut bytes)))
        });
    }
    g.finish();

    let mut g = c.benchmark_group("decode");
    g.throughput(elements);
    for &format in Format::ALL {
        let mut bytes = vec![0u8; rows / format.spec().block_rows * strip_bytes(format)];
        encode(format, &w, &mut scratch, &mut bytes);
        g.bench_function(format.name(), |b| b.iter(|| decode(format, black_box(&bytes), black_box(&mut out))));
    }
    g.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = codecs
}
criterion_main!(benches);
