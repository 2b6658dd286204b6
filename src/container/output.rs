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
    /// # Errors
    /// [`Error::Io`].
    pub fn create(path: &Path, len: u64) -> Result<Self> {
        let folder = match path.parent() {
            Some(p) if !p.as_os_str().is_empty() => p,
            _ => Path::new("."),
        };
        let mut builder = tempfile::Builder::new();
        builder.prefix(".bitlane-").suffix(".partial");
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666)); // the umask applies
        let io = |source| Error::Io { action: "create", path: path.into(), source };
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
        self.temp.persist(&path).map(drop).map_err(|e| Error::Io { action: "write", path, source: e.error })
    }
}
