//! The one error type of the crate. Every variant carries the numbers and the name of the thing,
//! so that a message can be acted on without a debugger.

use std::path::PathBuf;

use crate::format::Format;

/// `Result` with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong in bitlane.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused to read or write.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was being done: "open", "read", "write", …
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's own words.
        source: std::io::Error,
    },
    /// A file does not follow its container's rules.
    #[error("{file}: not a valid {container} file: at byte {offset}: {what}")]
    Malformed {
        /// Path of the file, or a name for bytes in memory.
        file: String,
        /// "GGUF", "safetensors" or "hfq".
        container: &'static str,
        /// Byte offset in the file of the field at fault.
        offset: u64,
        /// The rule that was broken, with its numbers.
        what: String,
    },
    /// The file's first bytes are those of no container that bitlane reads.
    #[error("{file}: neither GGUF, .hfq nor safetensors (first bytes {head:02x?})")]
    UnknownContainer {
        /// Path of the file.
        file: String,
        /// Up to eight first bytes.
        head: Vec<u8>,
    },
    /// A tensor is stored in a type that bitlane does not decode.
    #[error("{file}: tensor {tensor}: {what}")]
    UnsupportedTensor {
        /// Path of the file.
        file: String,
        /// The tensor.
        tensor: String,
        /// The type by number and name, and why it is refused.
        what: String,
    },
    /// A whole model is of a kind that bitlane cannot convert.
    #[error("{file}: {what}")]
    UnsupportedModel {
        /// Path of the file.
        file: String,
        /// What the model is, and why it is refused.
        what: String,
    },
    /// No tensor has this name.
    #[error("{file}: no tensor named {tensor}")]
    NoSuchTensor {
        /// Path of the file.
        file: String,
        /// The name asked for.
        tensor: String,
    },
    /// A row range or column count lies outside a tensor.
    #[error("tensor {tensor}: rows {start}..{end} of {rows}: {why}")]
    RowRange {
        /// The tensor.
        tensor: String,
        /// First row asked for.
        start: usize,
        /// One past the last row asked for.
        end: usize,
        /// Rows that there are.
        rows: usize,
        /// Which rule is broken.
        why: &'static str,
    },
    /// A shape cannot be stored in a format.
    #[error("tensor {tensor}: shape [{rows}, {cols}] does not fit {format}: {why}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// The format asked for.
        format: Format,
        /// M, rows of W.
        rows: usize,
        /// K, logical columns of W.
        cols: usize,
        /// Which rule is broken.
        why: String,
    },
    /// A slice has another length than its shape and format say.
    #[error("tensor {tensor}: {what} has {got} {unit}, but {format} [{rows}, {cols}] needs {expected}")]
    Length {
        /// The tensor.
        tensor: String,
        /// What was measured: "blob", "weights", "output", …
        what: &'static str,
        /// "bytes" or "values".
        unit: &'static str,
        /// The format.
        format: Format,
        /// M, rows of W.
        rows: usize,
        /// K as it is stored.
        cols: usize,
        /// Length that the shape needs.
        expected: usize,
        /// Length that was given.
        got: usize,
    },
    /// A weight or an activation is NaN or infinite.
    #[error("tensor {tensor}: value {value} at row {row}, column {col} is not finite")]
    NonFinite {
        /// The tensor.
        tensor: String,
        /// Row of W.
        row: usize,
        /// Column of W.
        col: usize,
        /// The value itself.
        value: f32,
    },
    /// A finite weight or group cannot be expressed in the format.
    #[error(
        "tensor {tensor}: {format} cannot hold row {row}, columns {col}..{col_end}: {what} {value:e} exceeds {limit}"
    )]
    OutOfRange {
        /// The tensor.
        tensor: String,
        /// The format.
        format: Format,
        /// Row of W.
        row: usize,
        /// First column of the group at fault.
        col: usize,
        /// One past the last column of the group.
        col_end: usize,
        /// "zero", "step", "scale" or "value".
        what: &'static str,
        /// The magnitude that does not fit.
        value: f32,
        /// The largest magnitude that does.
        limit: f32,
    },
    /// Two vectors or matrices that must agree in length do not.
    #[error("{what}: {left_name} is {left}, {right_name} is {right}")]
    Mismatch {
        /// The operation, with its tensor.
        what: String,
        /// Name of the first quantity.
        left_name: &'static str,
        /// Its value.
        left: usize,
        /// Name of the second quantity.
        right_name: &'static str,
        /// Its value.
        right: usize,
    },
    /// An activation was divided by another AWQ vector than the weights were multiplied by.
    #[error("tensor {tensor}: AWQ vector {weights}, but the activation was divided by {activation}")]
    AwqMismatch {
        /// The tensor.
        tensor: String,
        /// Identity of the weights' vector, or "none".
        weights: String,
        /// Identity of the activation's vector, or "none".
        activation: String,
    },
    /// An AWQ vector holds a value that cannot be divided by.
    #[error("tensor {tensor}: AWQ scale {value} of channel {channel} is not a positive finite half")]
    AwqValue {
        /// The tensor.
        tensor: String,
        /// Input channel (column of W).
        channel: usize,
        /// The value.
        value: f32,
    },
    /// A tensor's format works in another basis than the operation.
    #[error("tensor {tensor}: {format} is {is}, the operation wants {wants} weights")]
    WrongBasis {
        /// The tensor.
        tensor: String,
        /// Its format.
        format: Format,
        /// Its basis.
        is: &'static str,
        /// The basis asked for.
        wants: &'static str,
    },
    /// A format was given by a name that no format has.
    #[error("unknown format {name:?}; known: {known}")]
    UnknownFormat {
        /// The name asked for.
        name: String,
        /// All names, comma separated.
        known: String,
    },
    /// Two tensors of a file to be written would have the same name.
    #[error("two tensors would be called {tensor}")]
    DuplicateTensor {
        /// The name.
        tensor: String,
    },
    /// A container has no number for a format.
    #[error("tensor {tensor}: {container} has no number for {format}: {why}")]
    NotStorable {
        /// The tensor.
        tensor: String,
        /// Where the number would have to be: "the .hfq register".
        container: &'static str,
        /// The format.
        format: Format,
        /// Why, and what to do.
        why: &'static str,
    },
    /// A command line or an option makes no sense.
    #[error("{0}")]
    Usage(String),
    /// The caller asked to stop.
    #[error("cancelled; nothing was written")]
    Cancelled,
}
