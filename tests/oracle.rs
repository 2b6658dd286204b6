//! The oracle against straightforward f32 and f16 kernels: correct ones stay inside its bounds, and the
//! mistakes that kernels make do not.
//!
//! Every failure prints the seed, format and shape that replay it.

mod reference;

use std::fmt;
use std::sync::Arc;

use bitlane::format::{Basis, rotation};
use bitlane::oracle::{self, Act, Checked, gamma};
use bitlane::tensor::BasisMarker;
use bitlane::{
    Activation, Awq, EncodeOptions, Error, Format, Plain, QuantTensor, Result, Rotated, ScaleRounding, Weights,
};
use half::f16;
use reference::{Lcg, Segment};

/// What the weights look like, in the stored basis.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fill {
    /// [-1, 1).
    Unit,
    /// [-1, 1) in the first half of every 256 columns, [96, 160) in the second: a wrong half is far off.
    Disjoint,
    /// [-2^-18, 2^-18): f16's subnormals.
    Tiny,
}

/// One row of the table of tests.
#[derive(Clone, Copy)]
struct Case {
    seed: u32,
    format: Format,
    m: usize,
    k: usize,
    n: usize,
    fill: Fill,
    /// Whether MQ weights have AWQ scales.
    awq: bool,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { seed, format, m, k, n, fill, awq } = self;
        write!(f, "replay: seed {seed}, {format} [{m}, {k}], {n} vectors, {fill:?}, awq {awq}")
    }
}

/// Every format with tails in M, tails in K where the format pads, and 1 to 8 vectors.
fn table(fill: Fill) -> Vec<Case> {
    let mut cases = Vec::new();
    for &format in Format::ALL {
        let (ms, ks): (&[usize], &[usize]) = match format {
            Format::T2 => (&[32, 64, 96], &[256, 512, 768]),
            _ => (&[1, 7, 31, 33, 40, 53], &[256, 512, 768, 576, 600, 640]),
        };
        for &m in ms {
            for &k in ks {
                let i = cases.len();
                let (seed, n, awq) = (1000 + i as u32, 1 + (i + i / 6) % 8, i / 2 % 2 == 0);
                cases.push(Case { seed, format, m, k, n, fill, awq });
            }
        }
    }
    cases
}

/// One small shape of every format.
fn each_format(seed: u32, m: usize, k: usize, n: usize, fill: Fill) -> impl Iterator<Item = Case> {
    Format::ALL.iter().map(move |&format| {
        let m = if format == Format::T2 { m.next_multiple_of(32) } else { m };
        Case { seed, format, m, k, n, fill, awq: false }
    })
}

impl Case {
    fn has_special_rows(&self) -> bool {
        self.m > 2
    }

    /// The weights as a tensor: row 0 is all zero, row 1 of t2 all reserved.
    fn weights(&self, lcg: &mut Lcg) -> QuantTensor {
        let k = self.format.stored_k(self.k).unwrap();
        let mut w: Vec<f32> = (0..self.m * k)
            .map(|i| match self.fill {
                Fill::Unit => lcg.unit(),
                Fill::Disjoint if i % k % 256 < 128 => lcg.unit(),
                Fill::Disjoint => 128.0 + 32.0 * lcg.unit(),
                Fill::Tiny => lcg.unit() * 2f32.powi(-18),
            })
            .collect();
        if self.has_special_rows() {
            w[..k].fill(0.0);
        }
        let mut bytes = encode(self.format, k, &w);
        if self.format == Format::T2 {
            bytes.chunks_exact_mut(2176).take(k / 256).for_each(|tile| tile[64..128].fill(0xff));
        }
        QuantTensor::new("w", self.format, self.m, self.k, bytes, self.awq(lcg)).unwrap()
    }

    fn awq(&self, lcg: &mut Lcg) -> Option<Arc<Awq>> {
        let wanted = self.awq && self.format.basis() == Basis::Rotated;
        let scales = |lcg: &mut Lcg| (0..self.k).map(|_| f16::from_f32(12.0 + 8.0 * lcg.unit())).collect();
        wanted.then(|| Arc::new(Awq::new("w", scales(lcg)).unwrap()))
    }

    fn pair(&self) -> Pair {
        let mut lcg = Lcg::new(self.seed);
        let w = self.weights(&mut lcg);
        Pair::new(w, Activation::new(lcg.units(self.n * self.k), self.n, self.k).unwrap())
    }

    fn y0(&self) -> Vec<f32> {
        Lcg::new(self.seed + 1).units(self.n * self.m).iter().map(|y| y * 50.0).collect()
    }
}

/// Encodes weights that are in the stored basis already.
fn encode(format: Format, k: usize, w: &[f32]) -> Vec<u8> {
    let spec = format.spec();
    let mut bytes = vec![0; format.blob_len(w.len() / k, k).unwrap()];
    let strips = bytes.chunks_exact_mut(k / spec.block_cols * spec.block_bytes);
    for (w, bytes) in w.chunks_exact(spec.block_rows * k).zip(strips) {
        spec.codec.encode(w, k, ScaleRounding::NearestEven, bytes).unwrap();
    }
    bytes
}

/// Weights and an activation that fit each other.
enum Pair {
    Rotated(Weights<Rotated>, Activation<Rotated>),
    Plain(Weights<Plain>, Activation<Plain>),
}

impl Pair {
    fn new(w: QuantTensor, x: Activation<Plain>) -> Pair {
        match w.format().basis() {
            Basis::Rotated => {
                let x = oracle::rotate(&x, w.awq()).unwrap();
                Pair::Rotated(w.typed().unwrap(), x)
            }
            Basis::Plain => Pair::Plain(w.typed().unwrap(), x),
        }
    }

    fn w(&self) -> &QuantTensor {
        match self {
            Pair::Rotated(w, _) => w,
            Pair::Plain(w, _) => w,
        }
    }

    /// The vectors as kernels get them.
    fn x(&self) -> Vec<&[f32]> {
        match self {
            Pair::Rotated(_, x) => x.data().chunks_exact(x.width()).collect(),
            Pair::Plain(_, x) => x.data().chunks_exact(x.width()).collect(),
        }
    }

    /// The same activation on other weights of the same shape.
    fn gemv_of(&self, w: QuantTensor) -> Vec<f32> {
        let y = match self {
            Pair::Rotated(_, x) => oracle::gemv(&w.typed().unwrap(), x, None),
            Pair::Plain(_, x) => oracle::gemv(&w.typed().unwrap(), x, None),
        };
        narrow(&y.unwrap())
    }

    fn gemv(&self, y0: Option<&[f32]>) -> Checked {
        match self {
            Pair::Rotated(w, x) => oracle::gemv(w, x, y0).unwrap(),
            Pair::Plain(w, x) => oracle::gemv(w, x, y0).unwrap(),
        }
    }

    fn gemm(&self, y0: Option<&[f32]>) -> Checked {
        match self {
            Pair::Rotated(w, x) => oracle::gemm(w, x, y0).unwrap(),
            Pair::Plain(w, x) => oracle::gemm(w, x, y0).unwrap(),
        }
    }

    /// A kernel's outputs `[N][M]`: `dot` of what `decode` makes of every row with every vector.
    fn kernel<R>(&self, decode: impl Fn(&[Segment]) -> R, dot: impl Fn(&R, &[f32]) -> f32) -> Vec<f32> {
        let w = self.w();
        let row = |r| decode(&reference::row(w.format(), w.bytes(), r, w.stored_k()));
        let rows: Vec<R> = (0..w.m()).map(row).collect();
        self.x().into_iter().flat_map(|x| rows.iter().map(|row| dot(row, x)).collect::<Vec<_>>()).collect()
    }
}

/// y0 + y.
fn plus(y0: &[f32], y: &[f32]) -> Vec<f32> {
    y0.iter().zip(y).map(|(y0, y)| y0 + y).collect()
}

fn narrow(y: &Checked) -> Vec<f32> {
    y.value.iter().map(|v| *v as f32).collect()
}

fn decoded(row: &[Segment]) -> Vec<f32> {
    row.iter().flat_map(Segment::weights).collect()
}

type Sum = fn(&[f32], &[f32]) -> f32;

/// Orders in which kernels sum a row.
const ORDERS: [(&str, Sum); 6] = [
    ("forward", forward),
    ("backward", |w, x| w[..x.len()].iter().zip(x).rev().fold(0.0, |s, (w, x)| s + w * x)),
    ("fused", |w, x| w.iter().zip(x).fold(0.0, |s, (w, x)| w.mul_add(*x, s))),
    ("pairwise", pairwise),
    ("32 lanes", lanes),
    ("family", family),
];

fn forward(w: &[f32], x: &[f32]) -> f32 {
    w.iter().zip(x).fold(0.0, |s, (w, x)| s + w * x)
}

fn pairwise(w: &[f32], x: &[f32]) -> f32 {
    if x.len() == 1 {
        return w[0] * x[0];
    }
    let half = x.len() / 2;
    pairwise(&w[..half], &x[..half]) + pairwise(&w[half..], &x[half..])
}

/// Lane t owns every 32nd column; then a tree over the lanes.
fn lanes(w: &[f32], x: &[f32]) -> f32 {
    let mut lane = [0f32; 32];
    for (i, (w, x)) in w.iter().zip(x).enumerate() {
        lane[i % 32] += w * x;
    }
    tree(lane)
}

/// The family's own order: lane t owns weights 8t..8t+8 of every group of 256, group g goes to accumulator
/// g mod 4, then (a0 + a1) + (a2 + a3), then a tree over the lanes.
fn family(w: &[f32], x: &[f32]) -> f32 {
    let mut a = [[0f32; 32]; 4];
    for (i, (w, x)) in w.iter().zip(x).enumerate() {
        let lane = &mut a[i / 256 % 4][i % 256 / 8];
        *lane = w.mul_add(*x, *lane);
    }
    tree(std::array::from_fn(|t| (a[0][t] + a[1][t]) + (a[2][t] + a[3][t])))
}

fn tree(mut lane: [f32; 32]) -> f32 {
    for stride in [16, 8, 4, 2, 1] {
        for t in 0..stride {
            lane[t] += lane[t + stride];
        }
    }
    lane[0]
}

/// scale·Σqx + zero·Σx per segment.
fn factored(row: &[Segment], x: &[f32]) -> f32 {
    let (mut sum, mut at) = (0.0, 0);
    for segment in row {
        let x = &x[at.min(x.len())..(at + segment.q.len()).min(x.len())];
        let qx = segment.q.iter().zip(x).fold(0f32, |s, (q, x)| s + q * x);
        let sx = x.iter().fold(0f32, |s, x| s + x);
        sum += segment.scale * qx + segment.zero * sx;
        at += segment.q.len();
    }
    sum
}

fn assert_within(y: &Checked, got: &[f32], kernel: &str, case: &dyn fmt::Display) {
    let worst = y.worst(got);
    assert!(worst.within(), "{kernel}: {worst}\n{case}");
}

/// How far outside its bounds a wrong result lies.
fn assert_outside(y: &Checked, got: &[f32], times: f64, mistake: &str, case: &dyn fmt::Display) {
    let worst = y.worst(got);
    assert!(worst.ratio > times, "{mistake} goes unnoticed: {worst}\n{case}");
}

#[test]
fn every_f32_kernel_keeps_the_gemv_bound() {
    for fill in [Fill::Disjoint, Fill::Unit] {
        for case in table(fill) {
            let (pair, y0) = (case.pair(), case.y0());
            let (y, y_plus) = (pair.gemv(None), pair.gemv(Some(&y0)));
            let check = |name: &str, got: Vec<f32>| {
                assert_within(&y, &got, name, &case);
                assert_within(&y_plus, &plus(&y0, &got), &format!("{name}, +="), &case);
            };
            for (name, sum) in ORDERS {
                check(name, pair.kernel(decoded, |w, x| sum(w, x)));
            }
            check("factored", pair.kernel(<[Segment]>::to_vec, |row, x| factored(row, x)));
        }
    }
}

/// The oracle decodes and sums as the specification's words do, to f64.
#[test]
fn values_are_those_of_the_definition() {
    for case in table(Fill::Disjoint) {
        let pair = case.pair();
        let (w, y) = (pair.w(), pair.gemv(None));
        for (token, x) in pair.x().into_iter().enumerate() {
            for row in 0..w.m() {
                let weights = decoded(&reference::row(w.format(), w.bytes(), row, w.stored_k()));
                let terms = weights.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
                let (value, sum) = (terms.clone().sum::<f64>(), terms.map(f64::abs).sum::<f64>());
                let got = y.value[token * w.m() + row];
                assert!((got - value).abs() <= sum * 1e-13, "row {row}, token {token}: {got} {value}\n{case}");
            }
        }
    }
}

#[test]
fn bounds_are_those_of_the_definition() {
    for case in each_format(31, 33, 512, 2, Fill::Unit) {
        let pair = case.pair();
        let (w, y0) = (pair.w(), case.y0());
        let magnitudes = oracle::magnitude(w);
        let y = pair.gemv(Some(&y0));
        for (token, x) in pair.x().into_iter().enumerate() {
            for row in 0..w.m() {
                let segments = reference::row(w.format(), w.bytes(), row, 512);
                let by_definition = segments.iter().flat_map(|s| {
                    let zero = if w.format() == Format::T2 { s.scale } else { s.zero }.abs();
                    s.q.iter().map(move |q| (q * s.scale).abs() + zero)
                });
                let reserved = w.format() == Format::T2 && row == 1;
                let mut sum = 0.0;
                for ((expected, m), x) in by_definition.zip(&magnitudes[row * 512..]).zip(x) {
                    // The reserved pattern's magnitude is 4·|scale|, though it decodes like 1.
                    assert_eq!(*m, if reserved { 2.0 * expected } else { expected }, "row {row}\n{case}");
                    sum += f64::from(*m) * f64::from(x.abs());
                }
                let at = token * w.m() + row;
                let bound = gamma(516) * sum + f64::from(y0[at].abs()) * oracle::UNIT;
                assert!((y.bound[at] / bound - 1.0).abs() < 1e-12, "{} {bound}\n{case}", y.bound[at]);
            }
        }
    }
}

/// Exchanges what the two halves of every 256 columns of a strip keep apart; false where nothing does.
fn swap_half_parameters(format: Format, strip: &mut [u8]) -> bool {
    let swap = |b: &mut [u8], left: usize, right: usize, len: usize| (0..len).for_each(|i| b.swap(left + i, right + i));
    let size = format.spec().block_bytes;
    match format {
        Format::Mq6V2 | Format::Mq5V2 | Format::Mq4V2 | Format::Mq3V2 | Format::Mq2V2 => {
            strip.chunks_exact_mut(size).for_each(|group| swap(group, 0, 4, 4));
        }
        Format::T2 => strip.chunks_exact_mut(size).for_each(|tile| {
            (2048..2176).step_by(4).for_each(|scales| swap(tile, scales, scales + 2, 2));
        }),
        Format::Q8_0 => strip.chunks_exact_mut(8 * size).for_each(|blocks| {
            (0..4).for_each(|b| swap(blocks, size * b, size * (b + 4), 2));
        }),
        Format::F16 | Format::BF16 | Format::F32 => {
            strip.chunks_exact_mut(256 * size).for_each(|block| swap(block, 0, 128 * size, 128 * size));
        }
        Format::Mq4C | Format::Mq6V1 | Format::Mq5V1 | Format::Mq4V1 | Format::Mq3V1 | Format::Mq2V1 => return false,
    }
    true
}

fn halves_swapped(x: &[f32]) -> Vec<f32> {
    let mut x = x.to_vec();
    x.as_chunks_mut::<256>().0.iter_mut().for_each(|block| block.rotate_left(128));
    x
}

#[test]
fn the_wrong_half_leaves_the_bound() {
    for case in table(Fill::Disjoint) {
        let pair = case.pair();
        let (w, y) = (pair.w(), pair.gemv(None));
        let mut bytes = w.bytes().to_vec();
        let strip = bytes.len() / (w.m() / w.format().spec().block_rows);
        if bytes.chunks_exact_mut(strip).all(|strip| swap_half_parameters(w.format(), strip)) {
            let swapped = QuantTensor::new("w", w.format(), w.m(), w.logical_k(), bytes, w.awq().cloned()).unwrap();
            assert_outside(&y, &pair.gemv_of(swapped), 100.0, "the other half's scale and zero", &case);
        }
        let got = pair.kernel(decoded, |w, x| forward(w, &halves_swapped(x)));
        assert_outside(&y, &got, 10.0, "the other half's x", &case);
    }
}

/// Formats of one stride read through each other's headers.
#[test]
fn the_wrong_generation_leaves_the_bound() {
    for case in each_format(51, 5, 512, 1, Fill::Disjoint).filter(|c| c.format.basis() == Basis::Rotated) {
        let pair = case.pair();
        let (w, y) = (pair.w(), pair.gemv(None));
        let same_stride = |f: &Format| f.spec().block_bytes == w.format().spec().block_bytes && *f != w.format();
        let others: Vec<Format> = Format::ALL.iter().copied().filter(same_stride).collect();
        assert!(!others.is_empty());
        for other in others {
            let misread = QuantTensor::new("w", other, w.m(), 512, w.bytes().to_vec(), w.awq().cloned()).unwrap();
            assert_outside(&y, &pair.gemv_of(misread), 100.0, &format!("{} read as {other}", case.format), &case);
        }
    }
}

#[test]
fn one_wrong_code_leaves_the_bound() {
    let coded = |c: &Case| !matches!(c.format, Format::F16 | Format::BF16 | Format::F32);
    for case in each_format(71, 3, 256, 1, Fill::Unit).filter(coded) {
        let pair = case.pair();
        let x = pair.x()[0];
        let largest = (0..256).max_by(|a, b| x[*a].abs().total_cmp(&x[*b].abs())).unwrap();
        let one_off = |row: &[Segment]| {
            let mut row = row.to_vec();
            let len = row[0].q.len();
            row[largest / len].q[largest % len] += 1.0;
            decoded(&row)
        };
        let got = pair.kernel(one_off, |w, x| forward(w, x));
        assert_outside(&pair.gemv(None), &got, 2.0, "one code off by one", &case);
    }
}

/// A row that is all zero or all reserved: its values are 0, and where every magnitude is 0 nothing else will do.
#[test]
fn zero_rows_are_zero() {
    for case in each_format(91, 33, 512, 3, Fill::Disjoint) {
        let pair = case.pair();
        for y in [pair.gemv(None), pair.gemm(None)] {
            for token in 0..case.n {
                let zero = token * case.m;
                assert_eq!(y.value[zero], 0.0, "{case}");
                let wrong = |at: usize, value: f32| {
                    let mut got = narrow(&y);
                    got[at] = value;
                    y.worst(&got)
                };
                assert!(wrong(zero, 0.0).within(), "{case}");
                if case.format == Format::T2 {
                    assert_eq!(y.value[zero + 1], 0.0, "reserved\n{case}");
                    // What a decoder that takes the reserved pattern for +2 makes of the row.
                    let x = pair.x()[token];
                    let row = &reference::row(Format::T2, pair.w().bytes(), 1, 512);
                    let twice = row.iter().flat_map(|s| vec![2.0 * s.scale; 128]).collect::<Vec<_>>();
                    assert!(!wrong(zero + 1, forward(&twice, x)).within(), "{case}");
                } else {
                    assert_eq!(y.bound[zero], 0.0, "{case}");
                    assert_eq!(wrong(zero, 1e-30).ratio, f64::INFINITY, "{case}");
                }
            }
        }
    }
}

#[test]
fn vectors_do_not_touch_each_other() {
    for case in each_format(111, 7, 512, 8, Fill::Unit) {
        let mut lcg = Lcg::new(case.seed);
        let (w, x) = (case.weights(&mut lcg), lcg.units(case.n * case.k));
        let all = Pair::new(w.clone(), Activation::new(x.clone(), case.n, case.k).unwrap());
        for n in 1..=8 {
            let first = Pair::new(w.clone(), Activation::new(x[..n * case.k].to_vec(), n, case.k).unwrap());
            for (all, first) in [(all.gemv(None), first.gemv(None)), (all.gemm(None), first.gemm(None))] {
                let len = n * case.m;
                assert_eq!((&all.value[..len], &all.bound[..len]), (&first.value[..], &first.bound[..]), "{n}: {case}");
            }
        }
    }
}

/// A kernel whose weights are not finite cannot be approved, whatever it returns.
#[test]
fn weights_that_are_not_finite_approve_nothing() {
    for scale in [0x7c00u16, 0x7e00] {
        let mut tile = vec![0; 2176];
        tile[2048..2050].copy_from_slice(&scale.to_le_bytes());
        let w = QuantTensor::new("w", Format::T2, 32, 256, tile, None).unwrap().typed::<Plain>().unwrap();
        let y = oracle::gemv(&w, &Activation::new(vec![1.0; 256], 1, 256).unwrap(), None).unwrap();
        let worst = y.worst(&narrow(&y));
        assert_eq!((worst.index, worst.ratio), (0, f64::INFINITY));
    }
}

/// Blocks of 256 columns of one row, 1-norms.
fn norms<T: Copy + Into<f64>>(row: &[T]) -> Vec<f64> {
    row.chunks(256).map(|block| block.iter().map(|v| (*v).into().abs()).sum()).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// W, its AWQ scales (or ones) and X of a model, in the model's own basis.
struct Model {
    w: Vec<f32>,
    scales: Vec<f64>,
    awq: Option<Arc<Awq>>,
    x: Vec<f32>,
}

impl Model {
    fn new(case: &Case) -> Model {
        let mut lcg = Lcg::new(case.seed);
        let awq = case.awq(&mut lcg);
        let scales = match &awq {
            Some(awq) => awq.scales().iter().map(|s| s.to_f64()).collect(),
            None => vec![1.0; case.k],
        };
        Model { w: lcg.units(case.m * case.k), scales, awq, x: lcg.units(case.n * case.k) }
    }

    fn encode(&self, case: &Case) -> QuantTensor {
        let options = EncodeOptions { awq: self.awq.clone(), ..EncodeOptions::default() };
        QuantTensor::encode("w", case.format, case.m, case.k, &self.w, &options).unwrap()
    }

    fn activation(&self, case: &Case) -> Activation<Plain> {
        Activation::new(self.x.clone(), case.n, case.k).unwrap()
    }

    fn divided(&self, x: &[f32]) -> Vec<f64> {
        x.iter().zip(&self.scales).map(|(x, s)| f64::from(*x) / s).collect()
    }
}

fn rotated_cases(awq: bool) -> Vec<Case> {
    let rotated = |c: &Case| c.format.basis() == Basis::Rotated;
    let shapes = [(121, 3, 512), (122, 7, 576), (123, 5, 600)];
    let cases = |(seed, m, k)| each_format(seed, m, k, 2, Fill::Unit).filter(rotated).map(|c| Case { awq, ..c });
    shapes.into_iter().flat_map(cases).collect()
}

/// (R w)·(R x) = w·x. Tolerance: each value of a rotated block of v passes 8 additions (signs and 1/16 are
/// exact) and at most one AWQ division, so it is off by at most (γ_9/16)·‖v‖₁; w·x meets that once through
/// rotated x and once through rotated-back w, each time multiplied by the other side's 1-norm.
#[test]
fn rotated_products_equal_plain_ones() {
    for case in [rotated_cases(false), rotated_cases(true)].concat() {
        let model = Model::new(&case);
        let tensor = model.encode(&case);
        let (stored, plain) = (oracle::dequant(&tensor), tensor.to_f32());
        let k = tensor.stored_k();
        let y = Pair::new(tensor, model.activation(&case)).gemv(None);
        let mut unrotated = Vec::new();
        let mut bounds = Checked { value: Vec::new(), bound: Vec::new() };
        for x in model.x.chunks_exact(case.k) {
            for (stored, plain) in stored.chunks_exact(k).zip(plain.chunks_exact(case.k)) {
                bounds.value.push(plain.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum());
                bounds.bound.push(2.0 * gamma(9) / 16.0 * dot(&norms(stored), &norms(&model.divided(x))));
                unrotated.push(forward(stored, x));
            }
        }
        let outside = (0..y.value.len()).find(|i| (y.value[*i] - bounds.value[*i]).abs() > bounds.bound[*i]);
        assert_eq!(outside, None, "{:?} {bounds:?}\n{case}", y.value);
        assert_outside(&bounds, &unrotated, 100.0, "x that was not rotated", &case);
    }
}

/// (W·s)·(x/s) = W·x but for what quantization loses: per weight half a step, plus what rounding scale and
/// zero to halves moves the ends of the grid (v1 keeps both as f32).
#[test]
fn awq_cancels() {
    for case in rotated_cases(true) {
        let model = Model::new(&case);
        let tensor = model.encode(&case);
        let levels = ((1u32 << reference::bits(case.format)) - 1) as f64;
        let pair = Pair::new(tensor.clone(), model.activation(&case));
        let mut expected = Checked { value: Vec::new(), bound: Vec::new() };
        for (x, rotated) in model.x.chunks_exact(case.k).zip(pair.x()) {
            for (r, w) in model.w.chunks_exact(case.k).enumerate() {
                let segments = reference::row(case.format, tensor.bytes(), r, tensor.stored_k());
                let lost = segments.iter().zip(rotated.chunks_exact(128)).map(|(s, x)| {
                    let (scale, zero) = (f64::from(s.scale), f64::from(s.zero.abs()));
                    let ends = (levels * scale + zero) * 2f64.powi(-11);
                    (0.5 * scale + ends) * 1.01 * x.iter().map(|x| f64::from(x.abs())).sum::<f64>()
                });
                expected.value.push(w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum());
                expected.bound.push(lost.sum());
            }
        }
        assert_within(&expected, &narrow(&pair.gemv(None)), "AWQ and quantization", &case);
        // The same weights without their AWQ vector take x undivided.
        let bytes = tensor.bytes().to_vec();
        let forgotten = QuantTensor::new("w", case.format, case.m, case.k, bytes, None).unwrap();
        let y = Pair::new(forgotten, model.activation(&case)).gemv(None);
        if levels > 10.0 {
            assert_outside(&expected, &narrow(&y), 1.0, "x that was not divided", &case);
        }
    }
}

/// A token as a matrix unit gets it: divided by a power of two so that it fits, then rounded to f16.
fn staged(x: &[f32], scaled: bool) -> (Vec<f32>, f32) {
    let max = x.iter().fold(0f32, |m, x| m.max(x.abs()));
    let mut scale = 1.0;
    while scaled && scale < max {
        scale *= 2.0;
    }
    (x.iter().map(|x| f16::from_f32(x / scale).to_f32()).collect(), scale)
}

fn to_half(v: f32) -> f32 {
    f16::from_f32(v).to_f32()
}

/// Weights as f16 operands: one rounding of q·scale + zero (an f16 fused multiply-add).
fn one_rounding(row: &[Segment]) -> Vec<f32> {
    decoded(row).into_iter().map(to_half).collect()
}

/// Weights as f16 operands: q·scale and its sum with zero rounded apart.
fn two_roundings(row: &[Segment]) -> Vec<f32> {
    row.iter().flat_map(|s| s.q.iter().map(|q| to_half(to_half(q * s.scale) + to_half(s.zero)))).collect()
}

/// f16 operands, f32 accumulators over blocks of 16 columns.
fn matrix_unit(w: &[f32], x: &[f32], scaled: bool) -> f32 {
    let (x, scale) = staged(x, scaled);
    let blocks = w[..x.len()].chunks(16).zip(x.chunks(16));
    blocks.fold(0f32, |sum, (w, x)| sum + forward(w, x)) * scale
}

/// Activations that strain f16: ordinary tokens, tokens beyond its range (2e6 is so after AWQ too), and tokens
/// among its subnormals.
fn strained(case: &Case) -> Pair {
    let mut lcg = Lcg::new(case.seed);
    let w = case.weights(&mut lcg);
    let sizes = [1.0, 1e5, 2f32.powi(-16), 2e6];
    let x = (0..case.n * case.k).map(|i| lcg.unit() * sizes[i / case.k % 4]).collect();
    Pair::new(w, Activation::new(x, case.n, case.k).unwrap())
}

#[test]
fn every_f16_kernel_keeps_the_gemm_bound() {
    for fill in [Fill::Unit, Fill::Disjoint, Fill::Tiny] {
        for case in table(fill).into_iter().map(|c| Case { n: 4, ..c }) {
            let (pair, y0) = (strained(&case), case.y0());
            let (y, y_plus) = (pair.gemm(None), pair.gemm(Some(&y0)));
            assert_eq!((&y.value, &y_plus.value), (&pair.gemv(None).value, &pair.gemv(Some(&y0)).value));
            let check = |name: &str, got: Vec<f32>| {
                assert_within(&y, &got, name, &case);
                assert_within(&y_plus, &plus(&y0, &got), &format!("{name}, +="), &case);
            };
            check("one rounding", pair.kernel(one_rounding, |w, x| matrix_unit(w, x, true)));
            check("two roundings", pair.kernel(two_roundings, |w, x| matrix_unit(w, x, true)));
            check("f32", narrow(&y));
            let unscaled = pair.kernel(one_rounding, |w, x| matrix_unit(w, x, false));
            assert_outside(&y, &unscaled, f64::MAX, "a token beyond 65504 that was not scaled", &case);
        }
    }
}

#[test]
fn the_wrong_half_leaves_the_gemm_bound_too() {
    for case in each_format(131, 33, 512, 3, Fill::Disjoint) {
        let pair = case.pair();
        let got = pair.kernel(one_rounding, |w, x| matrix_unit(w, &halves_swapped(x), true));
        assert_outside(&pair.gemm(None), &got, 10.0, "the other half's x", &case);
    }
}

/// The term for f16's subnormals is needed, and no wider than that: without it weights 2^-20 times as large would
/// have bounds 2^-20 times as large, which a correct kernel breaks; with it a kernel that flushes them still fails.
#[test]
fn subnormal_weights_need_their_term() {
    let small = 2f32.powi(-20);
    let (m, k) = (33, 256);
    let mut lcg = Lcg::new(141);
    let (w, x) = (lcg.units(m * k), lcg.units(k));
    let pair = |factor: f32| {
        let w = encode(Format::F32, k, &w.iter().map(|w| w * factor).collect::<Vec<_>>());
        let w = QuantTensor::new("w", Format::F32, m, k, w, None).unwrap();
        Pair::new(w, Activation::new(x.clone(), 1, k).unwrap())
    };
    let (large, tiny) = (pair(1.0).gemm(None), pair(small).gemm(None));
    let without =
        Checked { value: tiny.value.clone(), bound: large.bound.iter().map(|b| b * f64::from(small)).collect() };
    let got = pair(small).kernel(one_rounding, |w, x| matrix_unit(w, x, true));
    assert!(tiny.worst(&got).within(), "{}", tiny.worst(&got));
    assert!(!without.worst(&got).within(), "{}", without.worst(&got));
    let flushed = pair(small).kernel(decoded, |_, _| 0.0);
    assert!(!tiny.worst(&flushed).within(), "{}", tiny.worst(&flushed));
}

/// A token of one large value, divided until that one fits, leaves its small values among f16's subnormals.
#[test]
fn small_values_beside_a_large_one_need_their_term() {
    let k = 256;
    let mut lcg = Lcg::new(145);
    let mut w = lcg.units(k);
    let mut x: Vec<f32> = lcg.units(k).iter().map(|x| x / 64.0).collect();
    (w[0], x[0]) = (0.0, 1e5);
    let pair = |x: &[f32]| {
        let w = QuantTensor::new("w", Format::F32, 1, k, encode(Format::F32, k, &w), None).unwrap();
        Pair::new(w, Activation::new(x.to_vec(), 1, k).unwrap())
    };
    let y = pair(&x).gemm(None);
    let got = pair(&x).kernel(one_rounding, |w, x| matrix_unit(w, x, true));
    assert!(y.worst(&got).within(), "{}", y.worst(&got));
    // Without the large value, which w[0] = 0 cancels, the product is the same and the bound that of a token below 1.
    x[0] = 0.0;
    let alone = pair(&x).gemm(None);
    assert_eq!(alone.value, y.value);
    assert!(!alone.worst(&got).within(), "{}", alone.worst(&got));
}

#[test]
fn relative_rms_of_f16_operands() {
    for case in each_format(151, 64, 512, 64, Fill::Unit) {
        let pair = case.pair();
        let got = pair.kernel(one_rounding, |w, x| matrix_unit(w, x, true));
        let y = pair.gemm(None);
        assert!(got.len() >= 4096);
        let rms = oracle::relative_rms(&got, &y);
        assert!(rms > 0.0 && rms <= 5e-4, "{rms}\n{case}");
        // bf16 operands are what the number must refuse.
        let bf16 = |v: f32| half::bf16::from_f32(v).to_f32();
        let coarse = pair.kernel(one_rounding, |w, x| forward(w, &x.iter().map(|x| bf16(*x)).collect::<Vec<_>>()));
        assert!(oracle::relative_rms(&coarse, &y) > 5e-4, "{case}");
    }
}

#[test]
fn rotate_divides_pads_and_rotates() {
    let mut lcg = Lcg::new(161);
    let (n, k) = (3, 600);
    let x = lcg.units(n * k);
    let awq = Arc::new(Awq::new("w", (0..k).map(|_| f16::from_f32(2.0 + lcg.unit())).collect()).unwrap());
    let plain = Activation::new(x.clone(), n, k).unwrap();
    for awq in [None, Some(&awq)] {
        let got = oracle::rotate(&plain, awq).unwrap();
        assert_eq!((got.n(), got.logical_k(), got.width(), got.awq()), (n, k, 768, awq));
        for (x, got) in x.chunks_exact(k).zip(got.data().chunks_exact(768)) {
            let scale = |i: usize| awq.map_or(1.0, |a| a.scales()[i].to_f32());
            let mut expected: Vec<f32> = (0..k).map(|i| x[i] / scale(i)).collect();
            expected.resize(768, 0.0);
            rotation::forward(&mut expected);
            assert_eq!(got, expected);
        }
        let sums = oracle::half_sums(&got);
        assert_eq!(sums.len(), n * 6);
        for (i, sum) in sums.iter().enumerate() {
            let expected: f64 = got.data()[128 * i..][..128].iter().map(|x| f64::from(*x)).sum();
            assert_eq!(*sum, expected);
        }
    }
}

#[test]
fn rotate_names_what_is_not_finite() {
    let (n, k) = (3, 300);
    let names = |x: Vec<f32>, awq: Option<&Arc<Awq>>| match oracle::rotate(&Activation::new(x, n, k).unwrap(), awq) {
        Err(Error::NonFinite { tensor, row, col, .. }) => (tensor, row, col),
        other => panic!("{other:?}"),
    };
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = vec![1.0; n * k];
        x[2 * k + 299] = bad;
        assert_eq!(names(x, None), ("activation".into(), 2, 299));
    }
    let tiny = Arc::new(Awq::new("w", vec![f16::from_f32(1e-3); k]).unwrap());
    let mut x = vec![1.0; n * k];
    x[k + 7] = 1e37;
    assert_eq!(names(x, Some(&tiny)), ("activation divided by its AWQ scales".into(), 1, 7));
    let mut x = vec![0.0; n * k];
    x[k..][..256].iter_mut().zip(&rotation::SIGNS1).for_each(|(x, s)| *x = s * 1e38);
    let (tensor, row, _) = names(x, None);
    assert_eq!((&*tensor, row), ("rotated activation", 1));
    let short = Arc::new(Awq::new("w", vec![f16::ONE; k - 1]).unwrap());
    let e = oracle::rotate(&Activation::new(vec![1.0; n * k], n, k).unwrap(), Some(&short)).unwrap_err();
    assert!(matches!(e, Error::Mismatch { left: 299, right: 300, .. }), "{e}");
}

fn rotated(name: &str, m: usize, k: usize, awq: Option<Arc<Awq>>) -> Weights<Rotated> {
    let options = EncodeOptions { awq, ..EncodeOptions::default() };
    let w = Lcg::new(171).units(m * k);
    QuantTensor::encode(name, Format::Mq4V2, m, k, &w, &options).unwrap().typed().unwrap()
}

fn ones(n: usize, k: usize) -> Activation<Plain> {
    Activation::new(vec![1.0; n * k], n, k).unwrap()
}

/// The error of every operation on `w` and `x`.
fn errors<B: BasisMarker>(w: &Weights<B>, x: &Activation<B>, y0: Option<&[f32]>) -> Vec<Error> {
    let mut all: Vec<Result<()>> = vec![oracle::gemv(w, x, y0).map(drop), oracle::gemm(w, x, y0).map(drop)];
    if y0.is_none() {
        all.push(oracle::fused(&[w], x).map(drop));
    }
    all.into_iter().map(|r| r.expect_err("a mismatch")).collect()
}

#[test]
fn a_wrong_k_is_refused() {
    // 576 and 640 are both stored as 768: the logical K differs all the same.
    for (w, x) in [(256, 512), (512, 256), (576, 640)] {
        let activation = oracle::rotate(&ones(1, x), None).unwrap();
        for e in errors(&rotated("q_proj", 3, w, None), &activation, None) {
            assert!(matches!(e, Error::Mismatch { left, right, .. } if (left, right) == (w, x)), "{e}");
            assert!(e.to_string().contains("q_proj"), "{e}");
        }
        let plain = QuantTensor::encode("norm", Format::Q8_0, 2, w, &vec![1.0; 2 * w], &EncodeOptions::default());
        for e in errors(&plain.unwrap().typed::<Plain>().unwrap(), &ones(1, x), None) {
            assert!(matches!(e, Error::Mismatch { left, right, .. } if (left, right) == (w, x)), "{e}");
        }
    }
}

#[test]
fn a_wrong_awq_vector_is_refused() {
    let awq = |seed: u32| {
        let mut lcg = Lcg::new(seed);
        Arc::new(Awq::new("w", (0..256).map(|_| f16::from_f32(1.5 + lcg.unit())).collect()).unwrap())
    };
    let id = |a: &Option<Arc<Awq>>| a.as_ref().map_or("none".into(), |a| format!("{:016x}", a.id()));
    for (of_w, of_x) in [(None, Some(awq(1))), (Some(awq(1)), None), (Some(awq(1)), Some(awq(2)))] {
        let x = oracle::rotate(&ones(2, 256), of_x.as_ref()).unwrap();
        for e in errors(&rotated("q_proj", 3, 256, of_w.clone()), &x, None) {
            let Error::AwqMismatch { tensor, weights, activation } = e else { panic!("{e}") };
            assert_eq!((tensor, weights, activation), ("q_proj".into(), id(&of_w), id(&of_x)));
        }
    }
    // Two vectors of equal content are one.
    let x = oracle::rotate(&ones(2, 256), Some(&awq(1))).unwrap();
    assert!(oracle::gemv(&rotated("q_proj", 3, 256, Some(awq(1))), &x, None).is_ok());
}

#[test]
fn a_wrong_y0_is_refused() {
    let (w, x) = (rotated("q_proj", 3, 256, None), oracle::rotate(&ones(2, 256), None).unwrap());
    for len in [0, 3, 5, 7] {
        for e in errors(&w, &x, Some(&vec![0.0; len])) {
            assert!(matches!(e, Error::Mismatch { left: 6, right, .. } if right == len), "{e}");
        }
    }
}

#[test]
fn a_wrong_basis_is_refused() {
    let e = QuantTensor::clone(&rotated("q_proj", 3, 256, None)).typed::<Plain>().unwrap_err();
    assert!(matches!(e, Error::WrongBasis { format: Format::Mq4V2, .. }), "{e}");
}

/// QKVZA: four outputs of any row counts and formats, each as if it were alone.
#[test]
fn fused_outputs_are_those_of_gemv() {
    let k = 576;
    let x = oracle::rotate(&Activation::new(Lcg::new(181).units(2 * k), 2, k).unwrap(), None).unwrap();
    let formats = [Format::Mq4V2, Format::Mq6V2, Format::Mq4C, Format::Mq3V1];
    let ws: Vec<Weights<Rotated>> = formats
        .into_iter()
        .zip([40, 17, 1, 16])
        .map(|(format, m)| {
            let w = Lcg::new(m as u32).units(m * k);
            QuantTensor::encode("w", format, m, k, &w, &EncodeOptions::default()).unwrap().typed().unwrap()
        })
        .collect();
    let ys = oracle::fused(&ws.iter().collect::<Vec<_>>(), &x).unwrap();
    assert_eq!(ys.len(), 4);
    for (w, y) in ws.iter().zip(ys) {
        assert_eq!(y.value.len(), 2 * w.m());
        assert_eq!(y, oracle::gemv(w, &x, None).unwrap());
    }
    let odd = [rotated("q_proj", 4, k, None), rotated("k_proj", 4, 512, None)];
    let e = oracle::fused(&[&odd[0], &odd[1]], &x).unwrap_err();
    assert!(matches!(e, Error::Mismatch { left: 512, right: 576, .. }) && e.to_string().contains("k_proj"), "{e}");
    let awq = Arc::new(Awq::new("v_proj", vec![f16::ONE; k]).unwrap());
    let odd = [rotated("q_proj", 4, k, None), rotated("v_proj", 4, k, Some(awq))];
    let e = oracle::fused(&[&odd[0], &odd[1]], &x).unwrap_err();
    assert!(matches!(&e, Error::AwqMismatch { tensor, .. } if tensor == "v_proj"), "{e}");
}

#[test]
fn act_mul_feeds_rotate() {
    let mut lcg = Lcg::new(191);
    let (gate, up) = (lcg.units(300), lcg.units(300));
    for act in [Act::Silu, Act::GeluTanh] {
        let y = oracle::act_mul(&gate, &up, act).unwrap();
        for (i, y) in y.iter().enumerate() {
            assert_eq!(*y, act.apply(f64::from(gate[i])) * f64::from(up[i]));
        }
        let x = Activation::new(y.iter().map(|y| *y as f32).collect(), 1, 300).unwrap();
        assert_eq!(oracle::rotate(&x, None).unwrap().width(), 512);
    }
}
