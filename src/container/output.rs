//! An output file that appears whole or not at all: a temporary file in the same folder, renamed when
//! everything was written. A process that is killed outright can leave the temporary file behind, never
//! a partial file under the final name.

use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::bytes::write_all_at;
use crate::error::{Error, Result};

/// See the module's head. Dropping it without [`commit`](Self::commit) removes the temporary file.
pub struct OutputFile {
    temp: NamedTempFile,
    path: PathBuf,
}

impl OutputFile {
    /// Begins a file of `len` bytes that will be called `path`.
    ///
    /// A link is followed, so that what it points to is replaced and not the link.
    ///
    /// # Errors
    /// [`Error::Io`], also when `path` is there and is no regular file: a folder, a device, a pipe.
    pub fn create(path: &Path, len: u64) -> Result<Self> {
        let io = |source| Error::Io { action: "create", path: path.into(), source };
        let path = &match std::fs::metadata(path) {
            Ok(there) if !there.is_file() => {
                return Err(io(std::io::Error::new(
                    std::io::ErrorKind::InvalidInput,
                    "it is there and no regular file",
                )));
            }
            Ok(_) => path.canonicalize().map_err(io)?,
            Err(_) => path.to_path_buf(),
        };
        let folder = match path.parent() {
            Some(p) if !p.as_os_str().is_empty() => p,
            _ => Path::new("."),
        };
        // Libraries that write by path go by the ending.
        let ending = path.extension().map(|e| format!(".{}", e.to_string_lossy())).unwrap_or_default();
        let suffix = format!(".partial{ending}");
        let mut builder = tempfile::Builder::new();
        builder.prefix(".bitlane-").suffix(&suffix);
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666)); // the umask applies
        // The library's own message would name the temporary file.
        let io =
            |source: std::io::Error| Error::Io { action: "create", path: path.clone(), source: source.kind().into() };
        let temp = builder.tempfile_in(folder).map_err(io)?;
        temp.as_file().set_len(len).map_err(io)?;
        Ok(OutputFile { temp, path: path.into() })
    }

    /// Writes `data` at `offset`; several threads may.
    ///
    /// # Errors
    /// [`Error::Io`], for example when the disk is full.
    pub fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        write_all_at(self.temp.as_file(), offset, data).map_err(|source| Error::Io {
            action: "write",
            path: self.path.clone(),
            source,
        })
    }

    /// Path of the unfinished file, for libraries that write by path.
    pub fn temp_path(&self) -> &Path {
        self.temp.path()
    }

    /// Gives the file its name, replacing what was there.
    ///
    /// # Errors
    /// [`Error::Io`]; what was there before is then untouched.
    pub fn commit(self) -> Result<()> {
        let path = self.path;
        // Some file systems report a full disk only now.
        self.temp.as_file().sync_all().map_err(|source| Error::Io { action: "write", path: path.clone(), source })?;
        self.temp.persist(&path).map(drop).map_err(|e| Error::Io { action: "write", path, source: e.error })
    }
}
