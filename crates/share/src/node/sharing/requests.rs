//! Requests that applications post: those of connections that share queue pairs, on their way to the device.

use super::*;

impl Sharing {
    pub(super) fn of_flow(&self, flow: FlowId) -> Option<(SharedId, ConnectionId)> {
        match self.qps.get(self.flows.get(&flow)?)?.stage {
            Stage::Shared(id, connection) => Some((id, connection)),
            _ => None,
        }
    }

    /// Adds a piece to those that [`Sharing::post_list`] posts. Returns false if its flow goes over the device's own queue pair.
    pub(in crate::node) fn add_piece(
        &mut self,
        egress: &mut Egress<SendRequest>,
        now: Time,
        piece: &egress::Piece,
    ) -> bool {
        let Some((id, connection)) = self.of_flow(piece.flow) else {
            return false;
        };
        let refused = |egress: &mut Egress<SendRequest>, status| {
            egress.refused(now, std::slice::from_ref(piece), status);
            true
        };
        let Some((line, mut keys)) = line!(self, id) else {
            return refused(egress, Status::LocalQpOperation);
        };
        let Some(request) = egress.body(piece) else {
            return refused(egress, Status::LocalQpOperation);
        };
        let part = (piece.offset, piece.length);
        let tag = piece.id.wr_id();
        let posts = line
            .mux
            .send(connection, request, part, piece.last, tag, &mut keys);
        match posts {
            Ok(posts) => {
                if piece.last {
                    egress.take_body(piece);
                }
                if self.list_of != Some(id) {
                    self.post_list();
                    self.list_of = Some(id);
                }
                self.list.extend([posts.first, posts.then].into_iter().flatten());
                true
            }
            Err(status) => refused(egress, status),
        }
    }

    /// Posts the requests of pieces that wait for it.
    pub(in crate::node) fn post_list(&mut self) {
        let Some(id) = self.list_of.take() else { return };
        let mut list = std::mem::take(&mut self.list);
        self.post_all(id, list.drain(..));
        self.list = list;
    }

    /// Posts requests to a shared queue pair, in this order. If one is not, the queue pair ends, and the next one has those behind it.
    pub(super) fn post_all(&mut self, id: SharedId, posts: impl IntoIterator<Item = Post>) {
        let (mut numbers, mut requests) = (Vec::new(), Vec::new());
        let mut refused = None;
        for post in posts {
            numbers.push(post.number);
            if refused.is_none() {
                match self.request_of(id, post) {
                    Ok(request) => requests.push(request),
                    Err(reason) => refused = Some(reason),
                }
            }
        }
        self.stalls_at.get_or_insert_with(|| Instant::now() + DOUBT_AFTER);
        let count = requests.len();
        let posted =
            self.peers
                .shared_qp(id)
                .map_or(0, |shared| match shared.qp().post_send_list(requests) {
                    Ok(()) => count,
                    Err(error) => error.index,
                });
        let Some(not_posted) = numbers.get(posted..).filter(|rest| !rest.is_empty()) else {
            return;
        };
        if let Some(mux) = self.touch(id) {
            for (nth, number) in (posted..).zip(not_posted) {
                match refused {
                    Some(NotPosted::Memory) if nth == count && posted == count => {
                        mux.refused(*number, Status::LocalProtection);
                    }
                    _ => mux.not_posted(*number),
                }
            }
        }
        self.peers.end_qp(Instant::now(), id);
    }

    /// Returns a request for the device.
    fn request_of(&self, id: SharedId, post: Post) -> Result<SendRequest, NotPosted> {
        let Some(line) = self.lines.get(&id) else {
            return Err(NotPosted::Device);
        };
        let (operation, sges) = match post.request {
            Posted::Direct(operation, list) => (operation, list),
            Posted::Message { buffer, header, body } => {
                let at = usize::from(buffer) * SLOT_LEN;
                let inline = body.as_inline().unwrap_or_default();
                let bytes = [&header[..], inline].concat();
                let written = line.buffers.write_in_any_order(at as u64, &bytes);
                written.map_err(|_| NotPosted::Device)?;
                let own = line.buffers_region.sge(at as u64, bytes.len() as u32);
                let list: SgeList = match body.as_slice() {
                    [] => own.into(),
                    [only] => [own, *only].as_slice().into(),
                    all if all.len() < rdmux_rnic::SGE_MAX => {
                        let all: Vec<Sge> = std::iter::once(own).chain(all.iter().copied()).collect();
                        all.as_slice().into()
                    }
                    all => {
                        // One element more than a request can have.
                        let bytes = self.read_shadows(all).ok_or(NotPosted::Memory)?;
                        let behind = (at + HEADER_LEN) as u64;
                        let written = line.buffers.write_in_any_order(behind, &bytes);
                        written.map_err(|_| NotPosted::Device)?;
                        let length = (HEADER_LEN + bytes.len()) as u32;
                        line.buffers_region.sge(at as u64, length).into()
                    }
                };
                (rdmux_rnic::Operation::Send { imm: None }, list)
            }
        };
        Ok(SendRequest {
            wr_id: post.number,
            operation,
            sges,
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        })
    }

    /// Returns the bytes of elements with keys of shared queue pairs.
    fn read_shadows(&self, list: &[Sge]) -> Option<Vec<u8>> {
        let mut all = Vec::new();
        for sge in list {
            let region = self.regions.of_lkey(*self.by_shadow.get(&sge.lkey)?)?;
            let mut bytes = vec![0; sge.length as usize];
            let at = region.place(sge.addr)?;
            region.spec.memory.read(at, &mut bytes).ok()?;
            all.extend(bytes);
        }
        Some(all)
    }

    /// Writes bytes to elements with keys of shared queue pairs. Returns false if their memory is gone.
    pub(super) fn write_shadows(&self, list: &[Sge], bytes: &[u8]) -> bool {
        let mut rest = bytes;
        list.iter().all(|sge| {
            let (now, later) = rest.split_at(rest.len().min(sge.length as usize));
            rest = later;
            let region = self
                .by_shadow
                .get(&sge.lkey)
                .and_then(|lkey| self.regions.of_lkey(*lkey));
            let place = region.and_then(|region| Some((region, region.place(sge.addr)?)));
            place.is_some_and(|(region, at)| region.spec.memory.write_in_any_order(at, now).is_ok())
        })
    }
}
