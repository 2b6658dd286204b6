//! Positioned reads from a file or from memory, and a cursor for headers. Hostile bytes stop here: every
//! length is checked against what is left of the file before anything is allocated for it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Result};

/// A file (or bytes in memory) that several threads may read at any offset.
#[derive(Debug, Clone)]
pub struct Bytes {
    name: Arc<str>,
    len: u64,
    inner: Inner,
}

#[derive(Debug, Clone)]
enum Inner {
    File(Arc<File>),
    Memory(Arc<Vec<u8>>),
}

impl Bytes {
    /// Opens a file for reading.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be opened or is no regular file.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |source| Error::Io { action: "open", path: path.into(), source };
        // Before opening: to open a pipe would wait for its writer.
        if !std::fs::metadata(path).map_err(io)?.is_file() {
            return Err(io(std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file")));
        }
        let file = File::open(path).map_err(io)?;
        let meta = file.metadata().map_err(io)?;
        Ok(Bytes { name: path.display().to_string().into(), len: meta.len(), inner: Inner::File(Arc::new(file)) })
    }

    /// Wraps bytes in memory; `name` stands for the path in messages.
    pub fn memory(name: &str, bytes: Vec<u8>) -> Self {
        Bytes { name: name.into(), len: bytes.len() as u64, inner: Inner::Memory(Arc::new(bytes)) }
    }

    /// The path, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no bytes at all.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Fills `out` from `offset`.
    ///
    /// # Errors
    /// [`Error::Io`], also when the file became shorter since it was opened.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let result = match &self.inner {
            Inner::File(file) => read_exact_at(file, offset, out),
            Inner::Memory(bytes) => match usize::try_from(offset).ok().and_then(|o| bytes.get(o..)?.get(..out.len())) {
                Some(slice) => {
                    out.copy_from_slice(slice);
                    Ok(())
                }
                None => Err(std::io::ErrorKind::UnexpectedEof.into()),
            },
        };
        result.map_err(|source| Error::Io { action: "read", path: PathBuf::from(&*self.name), source })
    }
}

#[cfg(unix)]
fn read_exact_at(file: &File, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut offset: u64, mut out: &mut [u8]) -> std::io::Result<()> {
    while !out.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, out, offset)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            n => {
                out = &mut out[n..];
                offset += n as u64;
            }
        }
    }
    Ok(())
}

/// Writes all of `data` at `offset`.
#[cfg(unix)]
pub(crate) fn write_all_at(file: &File, offset: u64, data: &[u8]) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, data, offset)
}

#[cfg(windows)]
pub(crate) fn write_all_at(file: &File, mut offset: u64, mut data: &[u8]) -> std::io::Result<()> {
    while !data.is_empty() {
        match std::os::windows::fs::FileExt::seek_write(file, data, offset)? {
            0 => return Err(std::io::ErrorKind::WriteZero.into()),
            n => {
                data = &data[n..];
                offset += n as u64;
            }
        }
    }
    Ok(())
}

/// Reads a header field by field, and says where it was when a field makes no sense.
pub(crate) struct Cursor<'a> {
    bytes: &'a Bytes,
    container: &'static str,
    pos: u64,
    window: Vec<u8>,
    window_start: u64,
}

/// Bytes read from the file at a time.
const WINDOW: usize = 1 << 16;

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a Bytes, container: &'static str, pos: u64) -> Self {
        Cursor { bytes, container, pos, window: Vec::new(), window_start: 0 }
    }

    pub(crate) fn pos(&self) -> u64 {
        self.pos
    }

    /// Bytes from here to the end of the file.
    pub(crate) fn left(&self) -> u64 {
        self.bytes.len() - self.pos
    }

    /// An error about the field that starts at `offset`.
    pub(crate) fn malformed(&self, offset: u64, what: impl Into<String>) -> Error {
        malformed(self.bytes, self.container, offset, what)
    }

    /// Checks that `n` more bytes exist; `what` names the field.
    pub(crate) fn need(&self, n: u64, what: &str) -> Result<()> {
        if n > self.left() {
            return Err(self.malformed(
                self.pos,
                format!("{what} takes {n} bytes, but {} are left of {}", self.left(), self.bytes.len()),
            ));
        }
        Ok(())
    }

    /// Checks that `count` things of at least `each` bytes can still be in the file.
    pub(crate) fn plausible(&self, offset: u64, count: u64, each: u64, what: &str) -> Result<()> {
        if count.checked_mul(each).is_none_or(|need| need > self.left()) {
            return Err(self.malformed(
                offset,
                format!("{count} {what} of at least {each} bytes each cannot fit in the {} bytes left", self.left()),
            ));
        }
        Ok(())
    }

    /// The next `n` bytes, which must be few (they are copied through a small window).
    fn small<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        self.need(N as u64, what)?;
        let at = self.pos.wrapping_sub(self.window_start);
        let inside = self.pos >= self.window_start && at + N as u64 <= self.window.len() as u64;
        if !inside {
            self.window.resize(WINDOW.min(usize::try_from(self.left()).unwrap_or(WINDOW)), 0);
            self.window_start = self.pos;
            self.bytes.read_at(self.pos, &mut self.window)?;
        }
        let at = (self.pos - self.window_start) as usize;
        self.pos += N as u64;
        Ok(std::array::from_fn(|i| self.window[at + i]))
    }

    pub(crate) fn u8(&mut self, what: &str) -> Result<u8> {
        Ok(self.small::<1>(what)?[0])
    }
    pub(crate) fn u16(&mut self, what: &str) -> Result<u16> {
        Ok(u16::from_le_bytes(self.small(what)?))
    }
    pub(crate) fn u32(&mut self, what: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.small(what)?))
    }
    pub(crate) fn u64(&mut self, what: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.small(what)?))
    }

    /// The next `n` bytes.
    pub(crate) fn take(&mut self, n: u64, what: &str) -> Result<Vec<u8>> {
        self.need(n, what)?;
        let mut out = vec![0u8; n as usize];
        // Strings are short and many: serve them from the window.
        let end = self.window_start + self.window.len() as u64;
        if self.pos >= self.window_start && self.pos + n <= end {
            let at = (self.pos - self.window_start) as usize;
            out.copy_from_slice(&self.window[at..at + n as usize]);
        } else if n as usize <= WINDOW / 4 {
            self.window.resize(WINDOW.min(usize::try_from(self.left()).unwrap_or(WINDOW)), 0);
            self.window_start = self.pos;
            self.bytes.read_at(self.pos, &mut self.window)?;
            out.copy_from_slice(&self.window[..n as usize]);
        } else {
            self.bytes.read_at(self.pos, &mut out)?;
        }
        self.pos += n;
        Ok(out)
    }

    /// The next `n` bytes as UTF-8.
    pub(crate) fn string(&mut self, n: u64, what: &str) -> Result<String> {
        let at = self.pos;
        String::from_utf8(self.take(n, what)?)
            .map_err(|e| self.malformed(at + e.utf8_error().valid_up_to() as u64, format!("{what} is not UTF-8")))
    }
}

/// Offset of a JSON error in `text`.
pub(crate) fn json_offset(text: &str, e: &serde_json::Error) -> u64 {
    let line_start: usize = text.split_inclusive('\n').take(e.line().saturating_sub(1)).map(str::len).sum();
    (line_start + e.column().saturating_sub(1)).min(text.len()) as u64
}

pub(crate) fn malformed(bytes: &Bytes, container: &'static str, offset: u64, what: impl Into<String>) -> Error {
    Error::Malformed { file: bytes.name().into(), container, offset, what: what.into() }
}
