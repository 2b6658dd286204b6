//! Reads a matrix of a .hfq file and multiplies it with a vector on the CPU oracle: what an engine's loader does.
//!
//! `cargo run --release --example read_hfq -- model.hfq model.layers.0.mlp.down_proj.weight`

use std::path::Path;

use bitlane::format::Basis;
use bitlane::{Activation, Container, Plain, Rotated, oracle};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(file), Some(name)) = (args.next(), args.next()) else {
        return Err("usage: read_hfq FILE TENSOR".into());
    };
    let w = Container::open(Path::new(&file))?.load(&name)?;
    println!("{w:?}");
    let x = Activation::new(vec![1.0; w.logical_k()], 1, w.logical_k())?;
    // Rotated weights take a rotated activation; handing them the plain one does not compile.
    let y = match w.format().basis() {
        Basis::Rotated => {
            let rotated = oracle::rotate(&x, w.awq())?;
            oracle::gemv(&w.typed::<Rotated>()?, &rotated, None)?
        }
        Basis::Plain => oracle::gemv(&w.typed::<Plain>()?, &x, None)?,
    };
    println!("row sums: {:.4?} …", &y.value[..y.value.len().min(4)]);
    println!("an f32 kernel may be off by {:.1e} there", y.bound[0]);
    Ok(())
}
