//! Matrix-vector products: GB/s of weight bytes, every format, beside what the machine copies in the same run.
//!
//! `cargo bench --bench gemv` · `BITLANE_BENCH_SHAPES=4096x14336` chooses shapes, `BITLANE_BENCH_LLC_MIB=600` how many MiB
//! of weights are rotated through (more than the last-level cache, so that weights come from memory).

use std::hint::black_box;
use std::time::Duration;

use bitlane::device::cpu;
use bitlane::format::Basis;
use bitlane::{Activation, EncodeOptions, Format, Plain, QuantTensor, Rotated, Weights, oracle};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

fn noise(n: usize) -> Vec<f32> {
    let mut s = 9u32;
    let mut next = move || {
        s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (s >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn shapes() -> Vec<(usize, usize)> {
    let text = std::env::var("BITLANE_BENCH_SHAPES").unwrap_or_else(|_| "4096x14336,2048x2048".into());
    text.split(',')
        .map(|s| s.split_once('x').expect("MxK"))
        .map(|(m, k)| (m.parse().expect("M"), k.parse().expect("K")))
        .collect()
}

enum W {
    Rotated(Weights<Rotated>),
    Plain(Weights<Plain>),
}

fn gemv(c: &mut Criterion) {
    let cpu_name = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu_name = cpu_name.lines().find_map(|l| l.strip_prefix("model name")).unwrap_or("unknown");
    println!("device: CPU{cpu_name}, {} threads", rayon::current_num_threads());
    let llc: usize = std::env::var("BITLANE_BENCH_LLC_MIB").ok().and_then(|v| v.parse().ok()).unwrap_or(600) << 20;

    let mut copy = c.benchmark_group("copy");
    let (from, mut to) = (vec![1u8; llc / 2], vec![0u8; llc / 2]);
    copy.throughput(Throughput::Bytes(from.len() as u64));
    copy.bench_function("memcpy, one thread", |b| b.iter(|| to.copy_from_slice(black_box(&from))));
    copy.finish();
    drop((from, to));

    for (m, k) in shapes() {
        let weights = noise(m * k);
        for format in Format::ALL {
            let Ok(w) = QuantTensor::encode("w", *format, m, k, &weights, &EncodeOptions::default()) else { continue };
            let bytes = w.bytes().len();
            let copies: Vec<W> = (0..(llc / bytes).clamp(1, 64))
                .map(|_| QuantTensor::new("w", *format, m, k, w.bytes().to_vec(), None).expect("checked above"))
                .map(|w| match format.basis() {
                    Basis::Rotated => W::Rotated(w.typed().expect("rotated")),
                    Basis::Plain => W::Plain(w.typed().expect("plain")),
                })
                .collect();
            let mut group = c.benchmark_group(format!("gemv {m}x{k}"));
            group.throughput(Throughput::Bytes(bytes as u64));
            for n in [1, 2, 4, 8] {
                let x = Activation::new(noise(n * k), n, k).expect("n*k values");
                let rotated = oracle::rotate(&x, None).expect("finite");
                let mut y = vec![0f32; n * m];
                let mut i = 0;
                group.bench_function(BenchmarkId::new(format.name(), format!("n={n}")), |b| {
                    b.iter(|| {
                        i = (i + 1) % copies.len();
                        match &copies[i] {
                            W::Rotated(w) => cpu::gemv(w, &rotated, &mut y, false),
                            W::Plain(w) => cpu::gemv(w, &x, &mut y, false),
                        }
                        .expect("shapes agree");
                    });
                });
            }
            group.finish();
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    targets = gemv
}
criterion_main!(benches);
