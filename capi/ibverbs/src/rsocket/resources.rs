//! Objects that a stream has on its device, from before it is connected.

use std::ffi::c_int;
use std::sync::Arc;

use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{
    Access, CompletionQueue, CreateError, Device, MemoryRegion, ProtectionDomain, QpOptions, QueuePair,
    RecvRequest, RegisterError, SgeList,
};
use rdmux_wire::rsocket::{ConnData, Iomap, Order, Target};

use super::options::SocketOptions;

/// Maximum number of control messages in flight, besides messages with data.
pub(super) const CONTROLS: u32 = 4;
/// Entries of the table of buffers.
pub(super) const BUFFERS: u64 = 2;
/// Bit set in the numbers of receives.
pub(super) const RECEIVE: u64 = 1 << 63;

/// Registered memory of the library itself.
pub(super) struct LibraryMemory {
    pub(super) memory: Arc<AnonymousMemory>,
    pub(super) mr: MemoryRegion,
    pub(super) length: u64,
}

impl LibraryMemory {
    pub(super) fn new(pd: &ProtectionDomain, length: u64, access: Access) -> Result<LibraryMemory, c_int> {
        let bytes = usize::try_from(length).map_err(|_| libc::ENOMEM)?;
        let memory = Arc::new(AnonymousMemory::new(bytes.max(1)).map_err(|_| libc::ENOMEM)?);
        let address = memory.address();
        let mr = pd
            .reg_mr(memory.clone(), 0, length.max(1), address, access)
            .map_err(|error| register_errno(&error))?;
        Ok(LibraryMemory { memory, mr, length })
    }

    /// Returns a part of it as a peer knows it, or so many entries of a table.
    pub(super) fn target(&self, offset: u64, length: u32) -> Target {
        Target {
            addr: self.mr.iova() + offset,
            rkey: self.mr.rkey().0,
            length,
        }
    }
}

pub(super) fn create_errno(error: &CreateError) -> c_int {
    match error {
        CreateError::Io(error) => error.raw_os_error().unwrap_or(libc::EIO),
        CreateError::NoRoom
        | CreateError::Limit(_)
        | CreateError::OtherDevice
        | CreateError::NoVector { .. }
        | CreateError::NoShare
        | CreateError::TwoShares
        | CreateError::BeyondShare { .. } => libc::ENOBUFS,
    }
}

pub(super) fn register_errno(_: &RegisterError) -> c_int {
    libc::ENOBUFS
}

pub(super) struct Resources {
    pub(super) qp: QueuePair,
    pub(super) cq: CompletionQueue,
    /// Bytes in flight.
    pub(super) send: LibraryMemory,
    /// Memory that the peer writes: two halves, one of which is being filled while the other is read.
    pub(super) receive: LibraryMemory,
    /// The peer's entries about its buffers, followed by those about its mappings.
    pub(super) tables: LibraryMemory,
    pub(super) iomaps: u16,
    pub(super) sq_size: u32,
    pub(super) rq_size: u16,
    pub(super) inline: usize,
}

impl Resources {
    pub(super) fn new(device: &Device, options: &SocketOptions) -> Result<Resources, c_int> {
        let errno = |error| create_errno(&error);
        let (sq_size, rq_size) = (u32::from(options.sq_size), options.rq_size);
        let pd = device.alloc_pd().map_err(errno)?;
        // Control messages use up receives for which no credit was given.
        let receives = u32::from(rq_size) + CONTROLS;
        let cq = device.create_cq(sq_size + receives).map_err(errno)?;
        let mut of_qp = QpOptions::new(&cq);
        (of_qp.max_send_wr, of_qp.max_recv_wr) = (sq_size, receives);
        let qp = pd.create_qp(&of_qp).map_err(errno)?;
        let from_peer = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let tables = BUFFERS * Target::LEN as u64 + u64::from(options.iomaps) * Iomap::LEN as u64;
        Ok(Resources {
            send: LibraryMemory::new(&pd, options.send_bytes.into(), Access::LOCAL_WRITE)?,
            receive: LibraryMemory::new(&pd, options.receive_bytes.into(), from_peer)?,
            tables: LibraryMemory::new(&pd, tables, from_peer)?,
            iomaps: options.iomaps,
            inline: options.inline.into(),
            qp,
            cq,
            sq_size,
            rq_size,
        })
    }

    /// Returns the length of half of the buffer for the peer's data: the amount that the peer is granted at a time.
    pub(super) fn half(&self) -> u64 {
        self.receive.length / 2
    }

    /// Returns the private data for the peer when connecting.
    pub(super) fn conn_data(&self) -> [u8; ConnData::LEN] {
        let mut bytes = [0; ConnData::LEN];
        let data = ConnData {
            order: Order::NATIVE,
            credits: self.rq_size,
            table: self.tables.target(0, BUFFERS as u32),
            iomaps: Some(self.iomaps),
            data: self.receive.target(0, self.half() as u32),
        };
        data.emit(&mut bytes);
        bytes
    }

    /// Posts a receive without memory: the bytes arrive by WRITE, beside the message.
    pub(super) fn post_receive(&self) -> Result<(), c_int> {
        let request = RecvRequest {
            wr_id: RECEIVE,
            sges: SgeList::EMPTY,
        };
        self.qp.post_recv(request).map_err(|_| libc::ENOBUFS)
    }

    /// Posts all receives.
    pub(super) fn post_receives(&self) -> Result<(), c_int> {
        (0..u32::from(self.rq_size) + CONTROLS).try_for_each(|_| self.post_receive())
    }
}
